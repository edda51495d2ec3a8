"""Draws tokens by one rule: a token is a function of (logits, parameters, seed, output index) and of nothing else."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .allowed_set import CHUNK_ELEMENTS, all_weights, allowed_set
from .philox import Purpose, uniform

_GROUP = 64  # a running sum over the vocabulary is one long chain of additions; sums of groups run in parallel
_LONG = 4096
NO_TOKEN = -1
"""Stands for the token of a row without any finite logit: it has no distribution."""


class Sampler:
    """Draws one token for each row. Each row's method follows from its own parameters, never from the batch."""

    def __init__(self, purpose: Purpose = Purpose.SAMPLE) -> None:
        """``purpose``: of the random numbers."""
        self._purpose = purpose

    def sample(
        self,
        logits: npt.NDArray[np.float32],
        params: Sequence[SamplingParams],
        output_indices: npt.NDArray[np.int64],
    ) -> list[int]:
        """Return token ids for logits [rows, vocab], after the processors changed them.

        A greedy row takes the largest logit, and among equals the lowest id; ``NO_TOKEN`` if no logit is finite.
        ``output_indices`` [rows] are those of the tokens to draw; 0 is the first of an output.
        """
        best = logits.argmax(axis=1)  # of a row that contains NaN: the first one
        token_ids: list[int] = best.tolist()
        largest = logits.take(best + _row_starts(*logits.shape))
        # One product for the batch, 2 µs a step: looking at each row was half of what a greedy step had gained.
        is_all_finite = math.isfinite(largest.dot(largest))  # cheaper than a look at each
        if not is_all_finite:
            for row in np.flatnonzero(~np.isfinite(largest)).tolist():
                # vLLM answers token 0 for such a row. Where some logits are finite the best of them is a token like any
                # other.
                if not np.isfinite(logits[row]).any():
                    token_ids[row] = NO_TOKEN
        random = [row for row, wanted in enumerate(params) if wanted.temperature != 0.0]
        if random:
            # A row that is not finite has no distribution; it must not fail the whole batch.
            rows = np.array(random)
            if not is_all_finite:
                rows = rows[np.isfinite(largest[random])]
            seeds = np.array([params[row].seed for row in rows.tolist()], dtype=np.uint64)
            numbers = uniform(seeds, output_indices[rows].astype(np.uint64), self._purpose)
            plain = np.array([_is_plain(params[row], logits.shape[1]) for row in rows.tolist()], dtype=bool)
            for row, u in zip(rows[~plain].tolist(), numbers[~plain].tolist(), strict=True):
                token_ids[row] = _draw(logits[row], params[row], u)
            self._draw_plain(logits, params, rows[plain], numbers[plain], token_ids)
        return token_ids

    def _draw_plain(
        self,
        logits: npt.NDArray[np.float32],
        params: Sequence[SamplingParams],
        rows: npt.NDArray[np.int64],
        numbers: npt.NDArray[np.float64],
        token_ids: list[int],
    ) -> None:
        """Draw for rows that may draw any token, several at a time."""
        step = max(1, CHUNK_ELEMENTS // logits.shape[1])
        for start in range(0, len(rows), step):
            chunk = rows[start : start + step]
            temperatures = np.array([params[row].temperature for row in chunk.tolist()])
            weights = all_weights(logits[chunk], temperatures)
            drawn_ids = _firsts_past(weights, numbers[start : start + step])
            for row, drawn in zip(chunk.tolist(), drawn_ids.tolist(), strict=True):
                token_ids[row] = drawn


@functools.lru_cache(maxsize=4)
def _row_starts(num_rows: int, width: int) -> npt.NDArray[np.int64]:
    """Return where each row begins among all elements: the same array in step after step."""
    return np.arange(0, num_rows * width, width)


def _is_plain(params: SamplingParams, vocab_size: int) -> bool:
    """Return whether no filter limits the tokens that a row may draw."""
    return params.top_p >= 1.0 and params.min_p <= 0.0 and not 0 < params.top_k < vocab_size


def _draw(logits: npt.NDArray[np.float32], params: SamplingParams, u: float) -> int:
    token_ids, weights = allowed_set(logits, params)
    # Mass adds up by ascending token id in float64, however the allowed tokens were found, so a token depends on
    # logits, parameters, seed and index only: a resumed or moved request draws the same. By descending weight, logits
    # that differ in their last bits could swap two tokens and move the sums of all between them.
    index = first_past(weights, u)
    return index if token_ids is None else int(token_ids[index])


def first_past(weights: npt.NDArray[np.float64], u: float) -> int:
    """Return the index of the first weight, [n], at which the running sum passes ``u`` of the whole; u in [0, 1)."""
    if len(weights) < _LONG:
        running = np.cumsum(weights)
        return _search_one(weights, running, u * float(running[-1]))
    return int(_firsts_past(weights[None], np.array([u]))[0])


def _search_one(weights: npt.NDArray[np.float64], running: npt.NDArray[np.float64], target: float) -> int:
    """Do what :func:`_search` does for one short row, [n], with a third of its calls."""
    index = int(np.searchsorted(running, target, side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])


def _firsts_past(weights: npt.NDArray[np.float64], numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Return :func:`first_past` of each row of weights [rows, n] with its own number, [rows]."""
    num_rows, width = weights.shape
    if width < _LONG:
        running = np.cumsum(weights, axis=1)
        return _search(weights, running, numbers * running[:, -1])
    whole = width // _GROUP * _GROUP
    sums = np.empty((num_rows, whole // _GROUP + 1))
    weights[:, :whole].reshape(num_rows, -1, _GROUP).sum(axis=2, out=sums[:, :-1])
    weights[:, whole:].sum(axis=1, out=sums[:, -1])
    running = np.cumsum(sums, axis=1)
    targets = numbers * running[:, -1]
    groups = _search(sums, running, targets)
    found: npt.NDArray[np.intp] = groups * _GROUP
    for row, group in enumerate(groups.tolist()):
        rest = weights[row : row + 1, group * _GROUP : (group + 1) * _GROUP]
        target = targets[row : row + 1] - (running[row, group] - sums[row, group])
        found[row] += _search(rest, np.cumsum(rest, axis=1), target)[0]
    return found


def _search(
    weights: npt.NDArray[np.float64], running: npt.NDArray[np.float64], targets: npt.NDArray[np.float64]
) -> npt.NDArray[np.intp]:
    """Return for each row the first place at which the running sum, [rows, n], is above the target, [rows]."""
    indices: npt.NDArray[np.intp] = np.count_nonzero(running <= targets[:, None], axis=1)
    for row in np.flatnonzero(indices == weights.shape[1]).tolist():  # the target is a rounding error above the sum
        indices[row] = np.flatnonzero(weights[row])[-1]
    return indices

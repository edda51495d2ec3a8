"""Draws tokens by one rule: a token is a function of (logits, parameters, seed, output index) and of nothing else."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams

from .allowed_set import allowed_set
from .philox import Purpose, uniform

_GROUP = 64  # a running sum over the vocabulary is one long chain of additions; sums of groups run in parallel
_LONG = 4096
NO_TOKEN = -1
"""Stands for the token of a row without any finite logit: it has no distribution."""


class Sampler:
    """Draws one token for each row. Each row's method follows from its own parameters, never from the batch."""

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
        is_all_finite = math.isfinite(largest.dot(largest))  # cheaper than a look at each
        if not is_all_finite:
            for row in np.flatnonzero(~np.isfinite(largest)).tolist():
                if not np.isfinite(logits[row]).any():
                    token_ids[row] = NO_TOKEN
        random = [row for row, wanted in enumerate(params) if wanted.temperature != 0.0]
        if random:
            # A row that is not finite has no distribution; it must not fail the whole batch.
            rows = np.array(random)
            if not is_all_finite:
                rows = rows[np.isfinite(largest[random])]
            seeds = np.array([params[row].seed for row in rows.tolist()], dtype=np.uint64)
            numbers = uniform(seeds, output_indices[rows].astype(np.uint64), Purpose.SAMPLE)
            for row, u in zip(rows.tolist(), numbers.tolist(), strict=True):
                token_ids[row] = _draw(logits[row], params[row], u)
        return token_ids


@functools.lru_cache(maxsize=4)
def _row_starts(num_rows: int, width: int) -> npt.NDArray[np.int64]:
    """Return where each row begins among all elements: the same array in step after step."""
    return np.arange(0, num_rows * width, width)


def _draw(logits: npt.NDArray[np.float32], params: SamplingParams, u: float) -> int:
    token_ids, weights = allowed_set(logits, params)
    index = first_past(weights, u)
    return index if token_ids is None else int(token_ids[index])


def first_past(weights: npt.NDArray[np.float64], u: float) -> int:
    """Return the index of the first weight, [n], at which the running sum passes ``u`` of the whole; u in [0, 1)."""
    if len(weights) < _LONG:
        running = np.cumsum(weights)
        return _search(weights, running, u * float(running[-1]))
    whole = len(weights) // _GROUP * _GROUP
    sums = np.append(weights[:whole].reshape(-1, _GROUP).sum(axis=1), weights[whole:].sum())
    running = np.cumsum(sums)
    target = u * float(running[-1])
    group = _search(sums, running, target)
    rest = weights[group * _GROUP : (group + 1) * _GROUP]
    return group * _GROUP + _search(rest, np.cumsum(rest), target - float(running[group] - sums[group]))


def _search(weights: npt.NDArray[np.float64], running: npt.NDArray[np.float64], target: float) -> int:
    index = int(np.searchsorted(running, target, side="right"))
    if index < len(weights):
        return index
    return int(np.flatnonzero(weights)[-1])  # the target is a rounding error above the sum

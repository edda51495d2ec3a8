"""The one sampling rule: a token is a function of (logits, parameters, seed, output index) and of nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.sampling_params import SamplingParams

from .allowed_set import allowed_set
from .philox import Purpose, uniform

_GROUP = 64  # a running sum over the vocabulary is one long chain of additions; sums of groups are not
_LONG = 4096


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row of logits is sampled."""

    params: SamplingParams
    output_index: int
    """Of the token to draw; 0 is the first output token."""


class Sampler:
    """Draws one token for each row. Each row's method follows from its own parameters, never from the batch."""

    def sample(self, logits: npt.NDArray[np.float32], rows: Sequence[RowSampling]) -> list[int]:
        """Token ids for logits [rows, vocab], which are what the processors left of the model's.

        A greedy row takes the largest logit, and among equals the lowest id.
        """
        token_ids: list[int] = logits.argmax(axis=1).tolist()
        drawn = [
            row
            for row, sampling in enumerate(rows)
            # A row that is not finite has no distribution; it must not take the batch down with it.
            if not sampling.params.is_greedy and np.isfinite(logits[row, token_ids[row]])
        ]
        if drawn:
            seeds = np.array([rows[row].params.seed for row in drawn], dtype=np.uint64)
            indices = np.array([rows[row].output_index for row in drawn], dtype=np.uint64)
            for row, u in zip(drawn, uniform(seeds, indices, Purpose.SAMPLE).tolist(), strict=True):
                token_ids[row] = _draw(logits[row], rows[row].params, u)
        return token_ids


def _draw(logits: npt.NDArray[np.float32], params: SamplingParams, u: float) -> int:
    token_ids, weights = allowed_set(logits, params)
    index = first_past(weights, u)
    return index if token_ids is None else int(token_ids[index])


def first_past(weights: npt.NDArray[np.float64], u: float) -> int:
    """Index of the first weight, [n], at which the running sum passes ``u`` of the whole; u in [0, 1)."""
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

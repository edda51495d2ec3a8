"""Computes log probabilities of the model's own logits, before masks, bias, penalties and temperature."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.messages import Logprobs

from .allowed_set import largest

Logits = npt.NDArray[np.float32]


def logprobs_of(logits: Logits, token_ids: Iterable[int], num_top: int, also: Sequence[int] = ()) -> Logprobs:
    """Return log probabilities for each row of logits [n, vocab]: of ``token_ids`` [n], the ``num_top`` best and
    ``also``.

    Each row is normalized alone, in float32. A row that is not finite gives NaN.
    """
    num_top = min(num_top, logits.shape[1])
    result = Logprobs([], [], num_top + len(also))
    others = np.array(also, dtype=np.intp)
    for row, token_id in zip(logits, token_ids, strict=True):
        normalizer = _log_sum_exp(row)
        named = np.concatenate([_best(row, num_top), others])
        result.sampled.append(float(row[token_id]) - normalizer)
        result.rank.append(_rank(row, token_id))
        result.token_ids += named.tolist()
        result.logprobs += (row[named].astype(np.float64) - normalizer).tolist()
    return result


def _log_sum_exp(row: Logits) -> float:
    peak = row.max()
    if not np.isfinite(peak):
        return math.nan
    return float(peak) + math.log(np.exp(row - peak).sum())


def _best(row: Logits, count: int) -> npt.NDArray[np.intp]:
    """Order the best first, and the lower id among equals."""
    if not count or not np.isfinite(row.max()):
        return np.arange(count)
    best = largest(row, count)
    order: npt.NDArray[np.intp] = best[np.argsort(-row[best], kind="stable")]
    return order


def _rank(row: Logits, token_id: int) -> int:
    """Return the rank in that order; 1 is the best."""
    value = row[token_id]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Holds the unchanged logits of the rows that ask."""

    indices: list[int]
    """[m]: indices among the rows of the step."""
    params: list[SamplingParams]
    """[m]"""
    logits: Logits
    """[m, vocab]"""

    def logprobs_of(self, token_ids: Sequence[int]) -> dict[int, Logprobs]:
        """Return log probabilities by index, once these tokens, one for each row of the step, were drawn."""
        return {
            index: logprobs_of(row[None], [token_ids[index]], params.logprobs or 0, params.logprob_token_ids or ())
            for index, params, row in zip(self.indices, self.params, self.logits, strict=True)
        }


class LogprobRows:
    """Holds the batch rows whose requests ask for log probabilities. A step without such rows costs one dict lookup."""

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}

    def __bool__(self) -> bool:
        """Return whether any row asks."""
        return bool(self._params)

    def add(self, row: int, params: SamplingParams) -> None:
        """Add a request."""
        if params.logprobs is not None:
            self._params[row] = params

    def remove(self, row: int) -> None:
        """Remove a request."""
        self._params.pop(row, None)

    def keep(self, logits: Logits, rows: npt.NDArray[np.int64]) -> KeptLogits | None:
        """Copy the logits [n, vocab] of these batch rows, [n], before they are changed; None if no row asks."""
        if not self._params:
            return None
        asking = [(index, self._params[row]) for index, row in enumerate(rows.tolist()) if row in self._params]
        indices = [index for index, _ in asking]
        return KeptLogits(indices, [params for _, params in asking], logits[indices])

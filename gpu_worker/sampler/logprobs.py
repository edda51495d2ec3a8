"""Log probabilities, from the model's own logits: before masks, bias, penalties and temperature, as in vLLM V1."""

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
    """Of ``token_ids`` [n], of the ``num_top`` best and of the tokens in ``also``, for each row of logits [n, vocab].

    A row is normalized alone, in float32. Of one that is not finite they are NaN.
    """
    num_top = min(num_top, logits.shape[1])
    result = Logprobs([], [], num_top + len(also))
    others = np.array(also, dtype=np.intp)
    for row, token_id in zip(logits, token_ids, strict=True):
        normalizer = _log_sum_exp(row)
        told = np.concatenate([_best(row, num_top), others])
        result.sampled.append(float(row[token_id]) - normalizer)
        result.rank.append(_rank(row, token_id))
        result.token_ids += told.tolist()
        result.logprobs += (row[told].astype(np.float64) - normalizer).tolist()
    return result


def _log_sum_exp(row: Logits) -> float:
    peak = row.max()
    if not np.isfinite(peak):
        return math.nan
    return float(peak) + math.log(np.exp(row - peak).sum())


def _best(row: Logits, count: int) -> npt.NDArray[np.intp]:
    """The best first, and among equals the lower id."""
    if not count or not np.isfinite(row.max()):
        return np.arange(count)
    best = largest(row, count)
    order: npt.NDArray[np.intp] = best[np.argsort(-row[best], kind="stable")]
    return order


def _rank(row: Logits, token_id: int) -> int:
    """Place in that order; 1 is the best."""
    value = row[token_id]
    return 1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Logits of the rows that ask, as the model gave them."""

    indices: list[int]
    """[m] among the rows of the step."""
    params: list[SamplingParams]
    """[m]"""
    logits: Logits
    """[m, vocab]"""

    def logprobs_of(self, token_ids: Sequence[int]) -> dict[int, Logprobs]:
        """By index, when these tokens, one for each row of the step, were drawn."""
        return {
            index: logprobs_of(row[None], [token_ids[index]], params.logprobs or 0, params.logprob_token_ids)
            for index, params, row in zip(self.indices, self.params, self.logits, strict=True)
        }


class LogprobRows:
    """The batch rows whose requests ask what they draw to be weighed. A step without any costs one look at a dict."""

    def __init__(self) -> None:
        self._params: dict[int, SamplingParams] = {}

    def __bool__(self) -> bool:
        """Whether any row asks."""
        return bool(self._params)

    def add(self, row: int, params: SamplingParams) -> None:
        """A request joins."""
        if params.logprobs is not None:
            self._params[row] = params

    def remove(self, row: int) -> None:
        """It leaves."""
        self._params.pop(row, None)

    def keep(self, logits: Logits, rows: npt.NDArray[np.int64]) -> KeptLogits | None:
        """Copies of logits [n, vocab] of these batch rows, [n], before anything changes them; None if nobody asks."""
        if not self._params:
            return None
        asking = [(index, self._params[row]) for index, row in enumerate(rows.tolist()) if row in self._params]
        indices = [index for index, _ in asking]
        return KeptLogits(indices, [params for _, params in asking], logits[indices])

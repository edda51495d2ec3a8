"""Computes log probabilities of the model's own logits, before masks, bias, penalties and temperature."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import Logprobs

from .sampler import CHUNK_ELEMENTS

Logits = npt.NDArray[np.float32]


def logprobs_of(logits: Logits, token_ids: Sequence[int], num_top: int, also: Sequence[int] = ()) -> Logprobs:
    """Return log probabilities for each row of logits [n, vocab]: of ``token_ids`` [n], the ``num_top`` best and
    ``also``.

    Each row is normalized alone, in float32. A row that is not finite gives NaN.
    """
    num_top = min(num_top, logits.shape[1])
    result = Logprobs([], [], num_top + len(also))
    step = max(1, CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(logits), step):
        chosen = np.asarray(token_ids[start : start + step], dtype=np.intp)
        result.extend(_of_chunk(logits[start : start + step], chosen, num_top, also))
    return result


def _of_chunk(rows: Logits, token_ids: npt.NDArray[np.intp], num_top: int, also: Sequence[int]) -> Logprobs:
    peaks = rows.max(axis=1)
    is_finite = np.isfinite(peaks)
    values = np.take_along_axis(rows, token_ids[:, None], axis=1)
    normalizers = _log_sum_exp(rows, peaks, is_finite)[:, None]
    named = np.empty((len(rows), num_top + len(also)), dtype=np.intp)
    named[:, :num_top] = _best(rows, is_finite, num_top)
    named[:, num_top:] = also
    named_values = np.take_along_axis(rows, named, axis=1)
    return Logprobs(
        sampled=(values.astype(np.float64) - normalizers).ravel().tolist(),
        rank=_ranks(rows, values, token_ids).tolist(),
        top=named.shape[1],
        token_ids=named.ravel().tolist(),
        logprobs=(named_values.astype(np.float64) - normalizers).ravel().tolist(),
    )


def _log_sum_exp(rows: Logits, peaks: Logits, is_finite: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the logarithm of each row's sum of exponentials, [n]; NaN for a row whose peak is not finite."""
    # Without NaN here, infinity minus infinity would warn in every step, and a row of all -inf would give log 0.
    shifted = np.subtract(rows, np.where(is_finite, peaks, np.float32(np.nan))[:, None])
    sums = np.exp(shifted, out=shifted).sum(axis=1)
    normalizers: npt.NDArray[np.float64] = peaks + np.log(sums.astype(np.float64))
    return normalizers


def _best(rows: Logits, is_finite: npt.NDArray[np.bool_], count: int) -> npt.NDArray[np.intp]:
    """Return the best tokens of each row, [n, count]: the best first, and the lower id among equals. A row whose peak
    is not finite has no order; its first tokens stand for them."""
    best = np.broadcast_to(np.arange(count), (len(rows), count)).copy()
    if not count or not is_finite.any():
        return best
    finite = rows[is_finite]
    reached = np.flatnonzero(finite >= _lower_bounds(finite, count)[:, None])  # faster than the indices of both axes
    row_of, token_ids = np.divmod(reached, finite.shape[1])
    order = np.lexsort((-finite.ravel()[reached], row_of))  # stable: the lower id stays first
    starts = np.searchsorted(row_of, np.arange(len(finite)))
    best[is_finite] = token_ids[order][starts[:, None] + np.arange(count)]
    return best


def _lower_bounds(rows: Logits, count: int) -> Logits:
    """Return numbers [n] that at least ``count`` values of each row reach, and few more: the ``count``-th largest of
    the maxima of disjoint groups."""
    # A sort of 150,000 logits to find a few is what this avoids: a maximum of groups is one pass, and only values above
    # the bound are sorted.
    num_columns = min(64, rows.shape[1] // (2 * count))
    if num_columns < 2:
        return np.full(len(rows), -np.inf, dtype=np.float32)
    num_groups = rows.shape[1] // num_columns
    maxima = rows[:, : num_groups * num_columns].reshape(len(rows), num_columns, num_groups).max(axis=1)
    bounds: Logits = np.partition(maxima, num_groups - count, axis=1)[:, num_groups - count]
    return bounds


def _ranks(rows: Logits, values: Logits, token_ids: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    """Return the tokens' ranks in that order, [n]; 1 is the best. ``values``: the tokens' logits, [n, 1]."""
    # A rank is a place in one order. vLLM counts all equal logits, so that the two best tokens both rank second if they
    # are equal.
    num_better: npt.NDArray[np.intp] = np.count_nonzero(rows > values, axis=1)
    row_of, equal = np.divmod(np.flatnonzero(rows == values), rows.shape[1])
    num_equal_before = np.bincount(row_of[equal < token_ids[row_of]], minlength=len(rows))
    return 1 + num_better + num_equal_before


class RowLogprobs(Protocol):
    """Has the log probabilities of a step once its tokens are drawn."""

    def logprobs_of(self, token_ids: Sequence[int]) -> dict[int, Logprobs]:
        """Return them by row of the step, of the rows that ask; ``token_ids`` has a token for each row."""


@dataclass(frozen=True, slots=True)
class JoinedLogprobs:
    """Fulfils :class:`RowLogprobs` for rows that the device drew, and for some that the host drew."""

    by_row: dict[int, Logprobs]
    """Of the tokens that the device drew."""
    others: RowLogprobs | None = None
    hosted: Sequence[int] = ()
    """The rows of the step that are those of ``others``."""

    def logprobs_of(self, token_ids: Sequence[int]) -> dict[int, Logprobs]:
        if self.others is None:
            return self.by_row
        found = self.others.logprobs_of([token_ids[row] for row in self.hosted])
        return self.by_row | {self.hosted[index]: logprobs for index, logprobs in found.items()}


@dataclass(frozen=True, slots=True)
class KeptLogits:
    """Holds the unchanged logits of the rows that ask."""

    indices: list[int]
    """[m]: indices among the rows of the step."""
    params: list[CoreSamplingParams]
    """[m]"""
    logits: Logits
    """[m, vocab]"""

    def logprobs_of(self, token_ids: Sequence[int]) -> dict[int, Logprobs]:
        """Return log probabilities by index, once these tokens, one for each row of the step, were drawn."""
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for place, params in enumerate(self.params):
            alike[params.logprobs or 0, tuple(params.logprob_token_ids or ())].append(place)
        by_index: dict[int, Logprobs] = {}
        for (num_top, also), places in alike.items():
            rows = self.logits if len(places) == len(self.params) else self.logits[places]
            indices = [self.indices[place] for place in places]
            columns = logprobs_of(rows, [token_ids[index] for index in indices], num_top, also)
            by_index.update(zip(indices, columns.positions(), strict=True))
        return by_index


class LogprobRows(dict[int, CoreSamplingParams]):
    """Holds the parameters of the batch rows whose requests ask for log probabilities. A step without such rows costs
    one dict lookup."""

    def wanted(self, row: int) -> tuple[int, Sequence[int]]:
        """Return how many of the best tokens a row that asks wants, and which others it names."""
        params = self[row]
        return params.logprobs or 0, params.logprob_token_ids or ()

    def keep(self, logits: Logits, rows: npt.NDArray[np.int64]) -> KeptLogits | None:
        """Copy the logits [n, vocab] of these batch rows, [n], before they are changed; None if no row asks."""
        if not self:
            return None
        asking = [(index, self[row]) for index, row in enumerate(rows.tolist()) if row in self]
        indices = [index for index, _ in asking]
        return KeptLogits(indices, [params for _, params in asking], logits[indices])

"""Finds the tokens that top-k, top-p and min-p leave, without sorting the vocabulary.

Tokens have one total order: larger first, and among equals the lower id. Each filter keeps a prefix of that order,
so top-k keeps exactly k tokens and top-k 1 is greedy.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

_COLUMNS = 64  # of the maxima that bound the k-th value from below: few elements pass, and the pass stays cheap
CHUNK_ELEMENTS = 1 << 15
"""Rows are computed together up to so many logits, which a core's cache holds: calls of numpy cost more than the
arithmetic of a short row."""
_FIRST_GUESS = 256  # tokens that hold the mass of most nuclei


def largest(values: npt.NDArray[np.floating[Any]], k: int) -> npt.NDArray[np.intp]:
    """Return the indices [min(k, n)] of the k largest values [n], ascending; equal values go to the lower index."""
    if k >= len(values):
        return np.arange(len(values))
    indices = np.flatnonzero(values >= _lower_bound(values, k))
    candidates = values[indices]
    kth = np.partition(candidates, len(candidates) - k)[len(candidates) - k]
    keep = candidates > kth
    # Of equal logits the lower id comes first, so that top-k leaves exactly k tokens and every engine the same ones.
    ties = np.flatnonzero(candidates == kth)
    keep[ties[: k - np.count_nonzero(keep)]] = True
    kept: npt.NDArray[np.intp] = indices[keep]
    return kept


def _lower_bound(values: npt.NDArray[np.floating[Any]], k: int) -> Any:
    """Return a number that at least k values reach: the k-th largest of the maxima of disjoint groups."""
    groups = len(values) // _COLUMNS
    if groups <= k:
        return -np.inf
    maxima = values[: groups * _COLUMNS].reshape(_COLUMNS, groups).max(axis=0)
    return np.partition(maxima, groups - k)[groups - k]


def nucleus(weights: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.intp]:
    """Return the ascending indices of the shortest prefix of the order whose mass reaches ``top_p`` of the whole."""
    target = top_p * weights.sum()
    size = _FIRST_GUESS
    while True:
        head = largest(weights, size)
        order = head[np.argsort(-weights[head], kind="stable")]
        mass = np.cumsum(weights[order])
        if mass[-1] >= target or len(head) == len(weights):
            return np.sort(order[: np.searchsorted(mass, target) + 1])
        size *= 16


def allowed_set(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.intp] | None, npt.NDArray[np.float64]]:
    """Return the ascending token ids that one row [vocab] may draw (None: all), and their unnormalised probabilities.

    The row's largest logit is finite. Temperature, then min-p, top-k and top-p, as vLLM V1 orders them: top-p is a
    share of what the other filters left.
    """
    token_ids: npt.NDArray[np.intp] | None = None
    if 0 < params.top_k < len(logits):
        token_ids = largest(logits, params.top_k)
        logits = logits[token_ids]
    weights: npt.NDArray[np.float64] = np.subtract(logits, logits.max(), dtype=np.float64)
    with np.errstate(over="ignore"):  # as in `all_weights`, without the calls that several rows need
        np.exp(np.divide(weights, params.temperature, out=weights), out=weights)
    # After top-k, though min-p is named first: it compares each weight with the largest one, which no other filter
    # removes, so its place changes nothing, and here it sees k tokens instead of the vocabulary.
    if params.min_p > 0.0:
        token_ids, weights = _select(token_ids, weights, np.flatnonzero(weights >= params.min_p))
    if params.top_p < 1.0:
        token_ids, weights = _select(token_ids, weights, nucleus(weights, params.top_p))
    return token_ids, weights


def all_weights(logits: npt.NDArray[np.float32], temperatures: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the unnormalised probabilities, [rows, n], of all tokens of logits [rows, n] at temperatures [rows]. The
    largest logit of each row is finite and gets 1."""
    weights: npt.NDArray[np.float64] = np.subtract(logits, logits.max(axis=1, keepdims=True), dtype=np.float64)
    with np.errstate(over="ignore"):  # a tiny temperature: -inf, probability zero
        np.exp(np.divide(weights, temperatures[:, None], out=weights), out=weights)
    return weights


def _select(
    token_ids: npt.NDArray[np.intp] | None, weights: npt.NDArray[np.float64], kept: npt.NDArray[np.intp]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
    return (kept if token_ids is None else token_ids[kept]), weights[kept]

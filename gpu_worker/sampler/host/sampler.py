"""Draws tokens by one rule: a token is a function of (logits, parameters, seed, output index) and of nothing else.

Tokens have one total order: larger first, and among equals the lower id. Each filter keeps a prefix of that order,
so top-k keeps exactly k tokens and top-k 1 is greedy.

Probabilities are integers, *weights*, made of a few operations in float32 that every device rounds alike. Their sums
are exact in any order, so numpy, the C++ kernel (``csrc/draw.cpp``) and the kernel of a GPU (``triton/sample.py``) draw
the same token, however each divides a row.

Random numbers are counter-based, by Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
2011). A number depends on its key and counter alone, so a request that was preempted, resumed or moved to another
engine draws the numbers it would have drawn, and requests of one batch never influence each other.
"""

import enum
import functools
import math
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams

REAL_PARAMETERS = ("temperature", "top_p", "min_p")
"""Those of a draw that are real numbers, in the order in which kernels take them: fields of a struct in C++, columns on
a GPU."""
real_parameters = attrgetter(*REAL_PARAMETERS)
"""Returns these of the parameters of a request."""

_ROUNDS = 10
_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], dtype=np.uint64)
_WEYL = np.array([0x9E3779B9, 0xBB67AE85], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)


class Purpose(enum.IntEnum):
    """Says what a number is drawn for, so that numbers of one request and index are not correlated between purposes."""

    SAMPLE = 0
    DRAFT = 1
    """Of a draft model, where rejection sampling verifies its drafts."""
    ACCEPT = 2
    """Decides whether rejection sampling accepts a draft."""
    RESIDUAL = 3
    """Of the token that rejection sampling draws in place of a draft."""


def philox(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Run ten rounds over 32-bit words held in uint64: counter [4, n], key [2, n] → [4, n]."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = x0 * _MULTIPLIERS[0], x2 * _MULTIPLIERS[1]
        x0, x1 = (product1 >> _WORD) ^ x1 ^ k0, product1 & _LOW
        x2, x3 = (product0 >> _WORD) ^ x3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return np.stack([x0, x1, x2, x3])


def uniform(
    seeds: npt.NDArray[np.uint64], output_indices: npt.NDArray[np.uint64], purpose: Purpose
) -> npt.NDArray[np.float64]:
    """Return [n] uniform float64 numbers in [0, 1) with 53 random bits, for n pairs (seed, output index)."""
    counter = np.zeros((4, len(seeds)), dtype=np.uint64)
    counter[0], counter[1] = output_indices & _LOW, output_indices >> _WORD
    counter[2] = purpose
    words = philox(counter, np.stack([seeds & _LOW, seeds >> _WORD]))
    # 53 bits, all that a float64 below 1 can hold: with fewer, tokens of a probability below the step would never be
    # drawn.
    bits: npt.NDArray[np.uint64] = (words[1] << _WORD | words[0]) >> np.uint64(11)
    return np.multiply(bits, 2.0**-53, dtype=np.float64)


WHOLE = 1 << 40
"""The weight of the largest logit. A sum of 2^22 of them is below 2^62."""
Weights: TypeAlias = npt.NDArray[np.int64]
Numbers: TypeAlias = npt.NDArray[Any]
"""Weights, or probabilities in float64, as rejection sampling has them."""
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


def nucleus(logits: npt.NDArray[np.float32], weights: Weights, top_p: float) -> npt.NDArray[np.intp]:
    """Return the ascending indices of the shortest prefix of the order of ``logits`` [n] whose ``weights`` [n] reach
    ``top_p`` of their sum."""
    total = int(weights.sum())
    target = max(1, min(total, math.ceil(float(total) * top_p)))
    size = _FIRST_GUESS
    while True:
        head = largest(logits, size)
        order = head[np.argsort(-logits[head], kind="stable")]
        mass = np.cumsum(weights[order])
        if mass[-1] >= target or len(head) == len(weights):
            return np.sort(order[: np.searchsorted(mass, target) + 1])
        size *= 16


_STEPS = 20
"""Bits behind the point of the power of two that is a token's share of the largest weight."""
_CUT = np.float32(41 << _STEPS)
"""A power with which a weight is below 1, so that it is 0."""
_OCTAVE = tuple(
    np.float32(float.fromhex(each))
    for each in ("0x1p24", "-0x1.62e3dp3", "0x1.ebe67p-19", "-0x1.c52116p-41", "0x1.2e4806p-63", "-0x1.f376bap-87")
)
"""Coefficients of 2^(24 - r / 2^20) for r in [0, 2^20): right to 4e-7, and less for each larger r, so that a token with
a larger logit never weighs less."""
_FLOAT32 = np.finfo(np.float32)
_EXPONENT = _FLOAT32.nmant


def rates(temperatures: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return by what the distance of a logit from the largest one is multiplied to get the power of :func:`weigh`."""
    with np.errstate(over="ignore"):  # of a tiny temperature
        exact = math.log2(math.e) * (1 << _STEPS) / temperatures
    # Not 0 and not infinite, so that the product with a distance of infinity or 0 is not NaN.
    return np.clip(exact, _FLOAT32.tiny, _FLOAT32.max).astype(np.float32)


def weigh(logits: npt.NDArray[np.float32], rate: npt.NDArray[np.float32] | np.float32) -> Weights:
    """Return the unnormalised probabilities of logits [..., n], of which the largest is finite and gets 2^40. 0 for
    what is more than 40 powers of two less likely."""
    top, weights = logits.max(axis=-1, keepdims=True), np.empty(logits.shape, dtype=np.int64)
    for begin in range(0, logits.shape[-1], CHUNK_ELEMENTS):
        part = np.s_[..., begin : begin + CHUNK_ELEMENTS]
        weights[part] = _weigh(top, logits[part], rate)
    return weights


def _weigh(
    top: npt.NDArray[np.float32],
    logits: npt.NDArray[np.float32],
    rate: npt.NDArray[np.float32] | np.float32,
) -> npt.NDArray[np.float32]:
    """Return the weights of a part of each row with this largest logit, as floats with a fraction."""
    with np.errstate(over="ignore"):
        power = np.subtract(top, logits)
        power *= rate
    steps = np.minimum(power, _CUT, out=power).astype(np.int32)
    within = np.bitwise_and(steps, (1 << _STEPS) - 1).astype(np.float32)
    # One rounding for each product and each sum, as the kernels have it: no fused operation.
    octave = np.multiply(within, _OCTAVE[5], out=power)
    for coefficient in _OCTAVE[4:0:-1]:
        octave += coefficient
        octave *= within
    octave += _OCTAVE[0]
    # Times 2^16 and divided by a power of two for each whole step: exact, by the exponent of a float32.
    steps >>= _STEPS
    steps <<= _EXPONENT
    octave *= np.subtract((127 + 16) << _EXPONENT, steps, out=steps).view(np.float32)
    return octave


def allowed_set(
    logits: npt.NDArray[np.float32], params: CoreSamplingParams
) -> tuple[npt.NDArray[np.intp] | None, Weights]:
    """Return the ascending token ids that one row [vocab] may draw (None: all), and their weights.

    The row's largest logit is finite. Temperature, then min-p, top-k and top-p, as vLLM V1 orders them: top-p is a
    share of what the other filters left.
    """
    token_ids: npt.NDArray[np.intp] | None = None
    if 0 < params.top_k < len(logits):
        token_ids = largest(logits, params.top_k)
        logits = logits[token_ids]
    weights = weigh(logits, rates(np.array([params.temperature]))[0])
    # After top-k, though min-p is named first: it compares each weight with the largest one, which no other filter
    # removes, so its place changes nothing, and here it sees k tokens instead of the vocabulary.
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= math.ceil(params.min_p * WHOLE))
        token_ids, logits, weights = _select(token_ids, kept), logits[kept], weights[kept]
    if params.top_p < 1.0:
        kept = nucleus(logits, weights, params.top_p)
        token_ids, weights = _select(token_ids, kept), weights[kept]
    return token_ids, weights


def all_weights(logits: npt.NDArray[np.float32], temperatures: npt.NDArray[np.float64]) -> Weights:
    """Return the weights, [rows, n], of all tokens of logits [rows, n] at temperatures [rows]. The largest logit of
    each row is finite."""
    return weigh(logits, rates(temperatures)[:, None])


def _select(token_ids: npt.NDArray[np.intp] | None, kept: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
    return kept if token_ids is None else token_ids[kept]


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
        params: Sequence[CoreSamplingParams],
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
        params: Sequence[CoreSamplingParams],
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


def _is_plain(params: CoreSamplingParams, vocab_size: int) -> bool:
    """Return whether no filter limits the tokens that a row may draw."""
    return params.top_p >= 1.0 and params.min_p <= 0.0 and not 0 < params.top_k < vocab_size


def _draw(logits: npt.NDArray[np.float32], params: CoreSamplingParams, u: float) -> int:
    token_ids, weights = allowed_set(logits, params)
    # Mass adds up by ascending token id. By descending weight, logits that differ in their last bits could swap two
    # tokens and move the sums of all between them.
    index = first_past(weights, u)
    return index if token_ids is None else int(token_ids[index])


def first_past(weights: Numbers, u: float) -> int:
    """Return the index of the first weight, [n], at which the running sum passes ``u`` of the whole; u in [0, 1)."""
    if len(weights) < _LONG:
        running = np.cumsum(weights)
        index = int(np.searchsorted(running, _targets(running[-1:], np.array([u]))[0], side="right"))
        return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
    return int(_firsts_past(weights[None], np.array([u]))[0])


def _targets(totals: Numbers, numbers: npt.NDArray[np.float64]) -> Numbers:
    """Return what running sums must pass, [rows], for ``numbers`` [rows] in [0, 1) of ``totals`` [rows]."""
    shares: npt.NDArray[np.float64] = totals * numbers
    # A sum of integers passes the share when it passes the whole number below it, and it passes no total.
    return shares if totals.dtype.kind == "f" else np.minimum(shares.astype(np.int64), totals - 1)


def _firsts_past(weights: Numbers, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """Return :func:`first_past` of each row of weights [rows, n] with its own number, [rows]."""
    num_rows, width = weights.shape
    if width < _LONG:
        running = np.cumsum(weights, axis=1)
        return _search(weights, running, _targets(running[:, -1], numbers))
    whole = width // _GROUP * _GROUP
    sums = np.empty((num_rows, whole // _GROUP + 1), dtype=weights.dtype)
    weights[:, :whole].reshape(num_rows, -1, _GROUP).sum(axis=2, out=sums[:, :-1])
    weights[:, whole:].sum(axis=1, out=sums[:, -1])
    running = np.cumsum(sums, axis=1)
    targets = _targets(running[:, -1], numbers)
    groups = _search(sums, running, targets)
    found: npt.NDArray[np.intp] = groups * _GROUP
    for row, group in enumerate(groups.tolist()):
        rest = weights[row : row + 1, group * _GROUP : (group + 1) * _GROUP]
        target = targets[row : row + 1] - (running[row, group] - sums[row, group])
        found[row] += _search(rest, np.cumsum(rest, axis=1), target)[0]
    return found


def _search(weights: Numbers, running: Numbers, targets: Numbers) -> npt.NDArray[np.intp]:
    """Return for each row the first place at which the running sum, [rows, n], is above the target, [rows]."""
    indices: npt.NDArray[np.intp] = np.count_nonzero(running <= targets[:, None], axis=1)
    for row in np.flatnonzero(indices == weights.shape[1]).tolist():  # a target of floats that rounds to the sum
        indices[row] = np.flatnonzero(weights[row])[-1]
    return indices

"""Computes log probabilities as ``sampler.logprobs`` does on the host, one program a row, without sorting."""

import triton
import triton.language as tl

from .sample import find_best, find_reached, ordered


@triton.jit(do_not_specialize=["out_stride"])
def logprobs(
    logits,
    token_ids,
    num_tops,
    also_starts,
    also_ids,
    out_ids,
    out_logits,
    out_ranks,
    out_normalizers,
    vocab,
    row_stride,
    out_stride,
    WIDTH: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Find a token's logit and rank, the best tokens and those that the request names. Grid: (rows,).

    Args:
        logits: [rows, vocab] float32; rows lie ``row_stride`` elements apart.
        token_ids: [rows] int64; a negative one stands for token 0.
        num_tops: [rows] int32: how many of the best tokens are wanted, at most vocab.
        also_starts: [rows + 1] int32: where the named tokens of each row begin in ``also_ids`` [named] int32.
        out_ids: [rows, out_stride] int32. The row's token, then the best tokens by ascending id, then those named.
        out_logits: [rows, out_stride] float32, of the same tokens.
        out_ranks: [rows] int32; 1 is the best, and the lower id among equals.
        out_normalizers: [rows] float64: the logarithm of the row's sum of exponentials; NaN if its largest logit is
            not finite. Such a row has no order, and no best tokens are written.
        LISTED: Named tokens that one turn of a loop reads.
    """
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    out_ids += row.to(tl.int64) * out_stride
    out_logits += row.to(tl.int64) * out_stride
    token_id = tl.maximum(tl.load(token_ids + row), 0)
    value = tl.load(base + token_id)
    tl.store(out_ids, token_id.to(tl.int32))
    tl.store(out_logits, value)
    largest, _, is_finite = find_best(base, vocab, WIDTH)
    total, num_better = _sums(base, vocab, largest, value, token_id, WIDTH)
    normalizer = tl.where(is_finite, largest.to(tl.float64) + tl.log(total), float("nan"))
    tl.store(out_normalizers + row, normalizer)
    tl.store(out_ranks + row, num_better + 1)
    num_top = tl.load(num_tops + row)
    if is_finite & (num_top > 0):
        _write_best(base, vocab, largest, num_top, out_ids + 1, out_logits + 1, WIDTH)
    begin, end = tl.load(also_starts + row), tl.load(also_starts + row + 1)
    lanes = tl.arange(0, LISTED)
    for first in tl.range(begin, end, LISTED):
        at = first + lanes
        named = tl.load(also_ids + at, mask=at < end, other=0)
        place = 1 + num_top + at - begin
        tl.store(out_ids + place, named, mask=at < end)
        tl.store(out_logits + place, tl.load(base + named, mask=at < end, other=0.0), mask=at < end)


@triton.jit
def _sums(base, vocab, largest, value, token_id, WIDTH: tl.constexpr):
    """Return the sum of exponentials above the largest logit, and how many tokens come before ``token_id``."""
    lanes = tl.arange(0, WIDTH)
    totals = tl.zeros([WIDTH], tl.float64)
    better = tl.zeros([WIDTH], tl.int32)
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        totals += tl.exp(x - largest).to(tl.float64)
        is_better = (x > value) | ((x == value) & (at < token_id))
        better += (is_better & (at < vocab)).to(tl.int32)
    return tl.sum(totals, 0), tl.sum(better, 0)


@triton.jit
def _write_best(base, vocab, largest, num_top, out_ids, out_logits, WIDTH: tl.constexpr):
    """Write the ``num_top`` best tokens, ascending, and their logits."""
    lanes = tl.arange(0, WIDTH)
    lowest = tl.zeros([1], tl.uint32)
    one = largest.to(tl.float64) * 0.0 + 1.0
    limit, above = find_reached(base, vocab, largest, one, lowest, num_top.to(tl.float32), 0.0, False, WIDTH)
    threshold = tl.max(limit, 0)
    num_equal = num_top - tl.max(above, 0).to(tl.int32)
    num_written = 0
    num_before = 0
    for begin in tl.range(0, vocab, WIDTH):
        at = begin + lanes
        x = tl.load(base + at, mask=at < vocab, other=float("-inf"))
        keys = ordered(x)
        is_equal = ((keys == threshold) & (at < vocab)).to(tl.int32)
        num_here = tl.sum(is_equal, 0)
        is_best = (keys > threshold) & (at < vocab)
        if (num_here > 0) & (num_before < num_equal):
            is_best = is_best | ((is_equal != 0) & (tl.cumsum(is_equal, 0) + num_before <= num_equal))
        num_before += num_here
        count = tl.sum(is_best.to(tl.int32), 0)
        if count > 0:
            place = num_written + tl.cumsum(is_best.to(tl.int32), 0) - 1
            tl.store(out_ids + place, at, mask=is_best)
            tl.store(out_logits + place, x, mask=is_best)
        num_written += count

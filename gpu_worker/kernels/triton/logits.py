"""Changes logits as ``sampler.LogitsProcessors`` does on the host, only the rows that ask, in place; and computes log
probabilities as ``sampler.logprobs`` does there, one program a row, without sorting.

An *edit* is what one row asks for. Masks and biases of single tokens come first, then masks over the vocabulary and
penalties. A mask gives -inf, which no later change moves, so the order among masks does not matter.
"""

import triton
import triton.language as tl

from .sample import find_best, find_reached, lane_bound, ordered

_SEEN = tl.constexpr(1 << 30)
_COUNT_BITS = tl.constexpr((1 << 30) - 1)


@triton.jit
def add_listed(logits, rows, starts, token_ids, values, row_stride, WIDTH: tl.constexpr):
    """Add values to the logits of single tokens. Grid: (edits,).

    Args:
        logits: [n, vocab] float32; rows lie ``row_stride`` elements apart.
        rows: [edits] int32, the row of each edit.
        starts: [edits + 1] int32: where the tokens of each edit begin in the list.
        token_ids: [listed] int32; no token occurs twice in an edit.
        values: [listed] float32. -inf masks the token, whatever its logit is.
    """
    edit = tl.program_id(0)
    base = logits + tl.load(rows + edit).to(tl.int64) * row_stride
    end = tl.load(starts + edit + 1)
    lanes = tl.arange(0, WIDTH)
    for begin in tl.range(tl.load(starts + edit), end, WIDTH):
        at = begin + lanes
        token_id = tl.load(token_ids + at, mask=at < end, other=0)
        value = tl.load(values + at, mask=at < end, other=0.0)
        x = tl.load(base + token_id, mask=at < end, other=0.0)
        x = tl.where(value == float("-inf"), value, x + value)
        tl.store(base + token_id, x, mask=at < end)


@triton.jit
def change_rows(
    logits,
    rows,
    mask_of,
    masks,
    slot_of,
    seen,
    repetitions,
    presences,
    frequencies,
    forced,
    vocab,
    row_stride,
    mask_stride,
    seen_stride,
    WIDTH: tl.constexpr,
):
    """Apply masks over the vocabulary, penalties and forced tokens. Grid: (edits, ceil(vocab / WIDTH)).

    Args:
        logits: [n, vocab] float32; rows lie ``row_stride`` elements apart.
        rows: [edits] int32, the row of each edit.
        mask_of: [edits] int32: which of ``masks`` holds for it; -1: none.
        masks: [m, mask_stride] int32: bit i of word w is set if token 32 * w + i is allowed.
        slot_of: [edits] int32: which row of ``seen`` is its own; -1: it has no penalties.
        seen: [slots, vocab] int32, rows ``seen_stride`` elements apart: 0 for a token that neither prompt nor output
            contain, otherwise 2 ** 30 plus its count in the output.
        repetitions, presences, frequencies: [edits] float64.
        forced: [edits] int32: the only token that may be drawn; -1: none.
    """
    edit = tl.program_id(0)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_inside = at < vocab
    place = logits + tl.load(rows + edit).to(tl.int64) * row_stride + at
    x = tl.load(place, mask=is_inside, other=0.0)
    mask = tl.load(mask_of + edit)
    if mask >= 0:
        words = tl.load(masks + mask.to(tl.int64) * mask_stride + at // 32, mask=is_inside, other=0)
        x = tl.where(((words >> (at % 32)) & 1) != 0, x, float("-inf"))
    slot = tl.load(slot_of + edit)
    if slot >= 0:
        words = tl.load(seen + slot.to(tl.int64) * seen_stride + at, mask=is_inside, other=0)
        repetition = tl.load(repetitions + edit)
        # Multiplied and added one after the other, as on the host: the launch forbids to fuse them.
        exact = x.to(tl.float64)
        exact = tl.where(exact > 0.0, exact / repetition, exact * repetition)
        counts = (words & _COUNT_BITS).to(tl.float64)
        once = tl.where(counts > 0.0, tl.load(presences + edit), 0.0)
        exact = exact - (tl.load(frequencies + edit) * counts + once)
        x = tl.where(words != 0, exact.to(tl.float32), x)
    only = tl.load(forced + edit)
    if only >= 0:
        x = tl.where(at == only, 0.0, float("-inf"))
    tl.store(place, x, mask=is_inside)


@triton.jit(do_not_specialize=["num_edits"])
def count_drawn(seen, rows, slot_of, drawn, num_edits, seen_stride, WIDTH: tl.constexpr):
    """Count the tokens that were drawn for the rows with penalties. Grid: (ceil(num_edits / WIDTH),).

    Args:
        seen, rows, slot_of: as in :func:`change_rows`; no two edits share a slot.
        drawn: [n] int64: the token of each row of the logits. A negative one is none and counts as token 0, which
            stands for it on the host until the request ends.
    """
    edit = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_edit = edit < num_edits
    slot = tl.load(slot_of + edit, mask=is_edit, other=-1)
    token_id = tl.load(drawn + tl.load(rows + edit, mask=is_edit, other=0), mask=is_edit, other=-1)
    place = seen + slot.to(tl.int64) * seen_stride + tl.maximum(token_id, 0)
    words = tl.load(place, mask=slot >= 0, other=0)
    tl.store(place, (words | _SEEN) + 1, mask=slot >= 0)


@triton.jit(do_not_specialize=["out_stride"])
def logprobs(
    logits,
    token_ids,
    num_tops,
    also_starts,
    also_ids,
    listed,
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
        listed: [rows, WIDTH] int32, memory for candidates.
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
    largest, _, is_finite, maxima = find_best(base, vocab, WIDTH)
    total, num_better = _sums(base, vocab, largest, value, token_id, WIDTH)
    normalizer = tl.where(is_finite, largest.to(tl.float64) + tl.log(total), float("nan"))
    tl.store(out_normalizers + row, normalizer)
    tl.store(out_ranks + row, num_better + 1)
    num_top = tl.load(num_tops + row)
    if is_finite & (num_top > 0):
        hint = lane_bound(maxima, num_top, WIDTH)
        listed += row.to(tl.int64) * WIDTH
        _write_best(base, vocab, largest, hint, listed, num_top, out_ids + 1, out_logits + 1, WIDTH)
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
def _write_best(base, vocab, largest, hint, listed, num_top, out_ids, out_logits, WIDTH: tl.constexpr):
    """Write the ``num_top`` best tokens, ascending, and their logits."""
    lanes = tl.arange(0, WIDTH)
    threshold, above = find_reached(base, vocab, hint, listed, largest, 1.0, 0, num_top.to(tl.int64), False, WIDTH)
    num_equal = num_top - above.to(tl.int32)
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

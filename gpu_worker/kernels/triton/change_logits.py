"""Changes logits as ``sampler.LogitsProcessors`` does on the host: only the rows that ask, in place.

An *edit* is what one row asks for. Masks and biases of single tokens come first, then masks over the vocabulary and
penalties. A mask gives -inf, which no later change moves, so the order among masks does not matter.
"""

import triton
import triton.language as tl

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

"""Computes prompts of Mamba-2 in chunks, as :mod:`.state_chunks` does for gated delta nets, with the same lists."""

import triton
import triton.language as tl

from .state_chunks import PASSES, low_part, store_parts
from .states import softplus


@triton.jit
def _multiply_exact(a, b, b_low, PARTS: tl.constexpr):
    """Return the product of a matrix in the model's dtype with the sum of two parts."""
    if PARTS == 1:
        return tl.dot(a, b, input_precision=PASSES)
    return tl.dot(a, b_low, tl.dot(a, b))


@triton.jit
def mamba2_pairs(
    b,
    c,
    dt,
    a,
    dt_bias,
    found,
    factors,
    chunks,
    row_stride,
    dt_stride,
    least_dt,
    most_dt,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Multiply what reads the state in each chunk with what writes to it. Grid: (N, HEADS).

    Args:
        b, c: [T, HEADS / GROUP, STATE], rows ``row_stride`` elements apart; dt: [T, HEADS], rows ``dt_stride`` apart.
        found: [N, HEADS, PARTS, CHUNK, CHUNK] in the model's dtype, written: how much of an earlier input, and of its
            own, a token finds.
        factors: [N, HEADS, 3, CHUNK] float32, written: the decay since the beginning of the chunk; the step of time,
            decayed to its end; and the decay over the chunk, repeated.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    tokens = tl.arange(0, CHUNK)
    is_token, rows, columns = tokens < (end - begin).to(tl.int32), tokens[:, None], tokens[None, :]
    KIND: tl.constexpr = b.dtype.element_ty
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    own = begin * row_stride + (head // GROUP) * STATE
    for start in tl.range(0, PADDED_STATE, BLOCK):
        elements = start + tl.arange(0, BLOCK)
        mask = is_token[:, None] & (elements < STATE)[None, :]
        at = rows * row_stride + elements[None, :]
        into, from_state = tl.load(b + own + at, mask=mask, other=0.0), tl.load(c + own + at, mask=mask, other=0.0)
        pairs += tl.dot(from_state, tl.trans(into), input_precision=PASSES)
    steps = tl.load(dt + begin * dt_stride + head + tokens * dt_stride, mask=is_token, other=0.0).to(tl.float32)
    time = tl.minimum(tl.maximum(softplus(steps + tl.load(dt_bias + head)), least_dt), most_dt)
    time = tl.where(is_token, time, 0.0)
    logs = time * tl.load(a + head)
    sums, total = tl.cumsum(logs, 0), tl.sum(logs, 0)
    # Above the diagonal a decay could be infinite, and is not used.
    pairs *= tl.exp(tl.where(columns <= rows, sums[:, None] - sums[None, :], 0.0)) * time[None, :]
    place, square = (chunk.to(tl.int64) * HEADS + head) * CHUNK, rows * CHUNK + columns
    earlier, everywhere = tl.where(columns <= rows, pairs, 0.0), rows + columns >= 0
    store_parts(found + place * (PARTS * CHUNK) + square, earlier, everywhere, CHUNK * CHUNK, KIND, PARTS)
    tl.store(factors + place * 3 + tokens, tl.exp(sums))
    tl.store(factors + place * 3 + CHUNK + tokens, tl.exp(tl.cumsum(logs, 0, reverse=True) - logs) * time)
    tl.store(factors + place * 3 + 2 * CHUNK + tokens, tl.exp(total + 0.0 * sums))


@triton.jit
def mamba2_chunks(
    x,
    b,
    c,
    d,
    found,
    factors,
    states,
    out,
    read,
    written,
    run_chunks,
    chains,
    chunks,
    row_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    STATE: tl.constexpr,
    PADDED_STATE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Apply Mamba-2, as ``StateOps.mamba2`` states it, chunk by chunk, with what :func:`mamba2_pairs` found. Grid:
    (chains, HEADS, HEAD / ROWS).

    Args:
        x: [T, HEADS, HEAD], rows ``row_stride`` elements apart as those of b and c; d: [HEADS] float32.
        states: [slots, HEADS, HEAD, STATE] float32, whose transposes are kept; out: [T, HEADS, HEAD].
    """
    chain, head = tl.program_id(0), tl.program_id(1)
    tokens, columns = tl.arange(0, CHUNK), tl.arange(0, PADDED_STATE)
    rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    is_row, is_column = rows < HEAD, columns < STATE
    is_element = is_column[:, None] & is_row[None, :]
    own_states, element = states + head * (HEAD * STATE), rows[None, :] * STATE + columns[:, None]
    direct = tl.load(d + head)
    first, last = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    slot = tl.load(read + first).to(tl.int64)
    state = tl.load(own_states + slot * (HEADS * HEAD * STATE) + element, mask=is_element & (slot >= 0), other=0.0)
    in_group = (head // GROUP) * STATE + columns
    of_group, turned = (
        tokens[:, None] * row_stride + in_group[None, :],
        tokens[None, :] * row_stride + in_group[:, None],
    )
    of_head = tokens[:, None] * row_stride + (head * HEAD + rows)[None, :]
    of_output = tokens[:, None] * (HEADS * HEAD) + (head * HEAD + rows)[None, :]
    square = tokens[:, None] * CHUNK + tokens[None, :]
    KIND: tl.constexpr = x.dtype.element_ty
    LOW: tl.constexpr = (PARTS - 1) * CHUNK
    for run in tl.range(first, last):
        start, stop = tl.load(run_chunks + run).to(tl.int64), tl.load(run_chunks + run + 1).to(tl.int64)
        for index in tl.range(0, stop - start):
            chunk = start + index
            begin, end = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1).to(tl.int64)
            is_token = tokens < (end - begin).to(tl.int32)
            place = (chunk * HEADS + head) * CHUNK
            mask = is_token[:, None] & is_row[None, :]
            inputs = tl.load(x + begin * row_stride + of_head, mask=mask, other=0.0)
            from_state = tl.load(
                c + begin * row_stride + of_group, mask=is_token[:, None] & is_column[None, :], other=0.0
            )
            high = state.to(KIND)
            result = _multiply_exact(from_state, high, low_part(state, high), PARTS)
            result *= tl.load(factors + place * 3 + tokens)[:, None]
            p = tl.load(found + place * (PARTS * CHUNK) + square)
            if PARTS == 1:
                result += tl.dot(p, inputs, input_precision=PASSES)
            else:
                p_low = tl.load(found + place * (PARTS * CHUNK) + LOW * CHUNK + square)
                result += tl.dot(p_low, inputs, tl.dot(p, inputs))
            wide = inputs.to(tl.float32)
            tl.store(out + begin * (HEADS * HEAD) + of_output, result + direct * wide, mask=mask)
            wide *= tl.load(factors + place * 3 + CHUNK + tokens)[:, None]
            high = wide.to(KIND)
            into = tl.load(b + begin * row_stride + turned, mask=is_column[:, None] & is_token[None, :], other=0.0)
            state *= tl.load(factors + place * 3 + 2 * CHUNK)
            state += _multiply_exact(into, high, low_part(wide, high), PARTS)
        target = tl.load(written + run).to(tl.int64)
        tl.store(own_states + target * (HEADS * HEAD * STATE) + element, state, mask=is_element)

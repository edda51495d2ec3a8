"""Changes rows: adds the last part's result to the residual stream and applies RMSNorm, in one pass, computes gates,
and rounds rows to 8-bit floats, each by a scale of its own; keeps copies of the batch's rows on the device, and makes
the arrays of a step from them, and the list of pages that FlashInfer reads."""

import triton
import triton.language as tl

from .kv_cache import LARGEST_FP8


@triton.jit
def add_norm(
    residual,
    delta,
    weight,
    out,
    size,
    eps,
    shift,
    HAS_DELTA: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Compute one row: ``residual`` += ``delta``, then ``out`` = residual / rms(residual) * (weight + shift).

    Grid: (rows,). residual, delta, out: [rows, size]; weight: [size]. WIDTH: a power of two, at least ``size``. It
    rounds where ``layers.norm.rms_norm`` does.
    """
    columns = tl.arange(0, WIDTH)
    is_column = columns < size
    at = tl.program_id(0).to(tl.int64) * size + columns
    x = tl.load(residual + at, mask=is_column, other=0.0)
    if HAS_DELTA:
        x = (x.to(tl.float32) + tl.load(delta + at, mask=is_column, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(residual + at, x, mask=is_column)
    wide = x.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    factors = tl.load(weight + columns, mask=is_column, other=0.0)
    if HAS_SHIFT:
        result = (wide * (factors.to(tl.float32) + shift)).to(x.dtype)
    else:
        result = (factors.to(tl.float32) * wide.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(out + at, result, mask=is_column)


@triton.jit
def round_rows(x, numbers, scales, size, WIDTH: tl.constexpr):
    """Round one row of x [n, size] to ``numbers`` [n, size], 8-bit floats, with its factor in ``scales`` [n] float32.

    Grid: (n,). WIDTH: elements that the program reads at a time. The scale of a row that is not finite is NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH)
    largest = tl.zeros([WIDTH], tl.float32)
    for begin in tl.range(0, size, WIDTH):
        part = tl.load(x + row * size + begin + columns, mask=begin + columns < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(part), propagate_nan=tl.PropagateNan.ALL)
    # The sum is NaN where an element is NaN, which the largest of all might not be.
    whole = tl.max(largest, 0) + 0.0 * tl.sum(largest, 0)
    scale = tl.where(whole > 0.0, whole / LARGEST_FP8, tl.where(whole == 0.0, 1.0, float("nan")))
    for begin in tl.range(0, size, WIDTH):
        is_column = begin + columns < size
        part = tl.load(x + row * size + begin + columns, mask=is_column, other=0.0).to(tl.float32)
        number = tl.clamp(part / scale, -LARGEST_FP8, LARGEST_FP8)
        tl.store(numbers + row * size + begin + columns, number.to(numbers.dtype.element_ty), mask=is_column)
    tl.store(scales + row, scale)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return the activation of float32 ``x``. KIND: "silu", "gelu" (exact), "gelu_tanh" or "relu"."""
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tl.static_assert(KIND == "relu", "there are silu, gelu, gelu_tanh and relu")
        return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def gate(gate_up, out, size, KIND: tl.constexpr, WIDTH: tl.constexpr):
    """Compute ``out`` = activation(gate) * up for WIDTH columns of one row, rounding where PyTorch's operations do.

    Grid: (rows, size / WIDTH, rounded up). gate_up: [rows, 2 * size], all gates of a row before its ups; out:
    [rows, size].
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_column = columns < size
    at = row * 2 * size + columns
    gates = tl.load(gate_up + at, mask=is_column, other=0.0)
    ups = tl.load(gate_up + at + size, mask=is_column, other=0.0).to(tl.float32)
    active = activate(gates.to(tl.float32), KIND).to(gates.dtype).to(tl.float32)
    tl.store(out + row * size + columns, (active * ups).to(gates.dtype), mask=is_column)


@triton.jit(do_not_specialize=["count"])
def scatter(target, places, values, count, WIDTH: tl.constexpr):
    """Write ``values[i]`` to ``target[places[i]]``. Grid: (count / WIDTH, rounded up).

    Args:
        target: Of the dtype of ``values``.
        places: [count] int64, no two of which are equal.
    """
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    is_value = at < count
    place = tl.load(places + at, mask=is_value, other=0)
    tl.store(target + place, tl.load(values + at, mask=is_value), mask=is_value)


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "num_entries", "padded_tokens", "padded_entries"])
def prepare_step(
    rows,
    starts,
    lengths,
    sent_ids,
    sent_work,
    last_tokens,
    shifts,
    tables,
    token_ids,
    positions,
    slots,
    step_tables,
    query_starts,
    seq_lens,
    work,
    num_requests,
    num_tokens,
    num_entries,
    padded_tokens,
    padded_entries,
    row_stride,
    slots_stride,
    tables_stride,
    columns,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Make the arrays of one request, or of padding. Grid: (requests with padding + 1,).

    The programs behind the requests pad: each makes a request without tokens. The last one makes the list of the
    attention kernel, whose entries of padding have no request, and the tokens behind those of all requests, which have
    slot -1: their keys and values are written nowhere.

    Args:
        rows: [num_requests] int32: the row of each request.
        starts: [num_requests + 1] int32: where its tokens begin, from 0 to num_tokens.
        lengths: [num_requests] int32: how many tokens it has in the cache after the step.
        sent_ids: [num_tokens] int32; negative: the token is that which its row drew last.
        sent_work: [num_entries, 4] int32: see ``paged_attention.attend``.
        last_tokens: [all rows] int64.
        shifts: [all rows] int64: added to the index of a token to get its rotary position.
        tables: [all rows, row_stride] int32: column ``index * GROUPS + group`` is a block id.
        token_ids: [padded_tokens] int64, as are ``positions``. Written, as are all arrays that follow.
        slots: [GROUPS, slots_stride] int64: block id * BLOCK + place in it.
        step_tables: [GROUPS, requests, columns] int32, of which a group has ``tables_stride``.
        query_starts: [requests + 1] int32. ``seq_lens``: [requests] int32. ``work``: [padded_entries, 4] int32.
        WIDTH: Tokens or blocks that one turn of a loop makes.
    """
    request = tl.program_id(0)
    if request == tl.num_programs(0) - 1:
        tl.store(query_starts, 0)
        for begin in range(0, 4 * padded_entries, WIDTH):
            at = begin + tl.arange(0, WIDTH)
            entry = tl.load(sent_work + at, mask=at < 4 * num_entries, other=-1)
            tl.store(work + at, entry, mask=at < 4 * padded_entries)
        for begin in range(num_tokens, padded_tokens, WIDTH):
            at = begin + tl.arange(0, WIDTH)
            is_padding = at < padded_tokens
            tl.store(token_ids + at, tl.zeros([WIDTH], tl.int64), mask=is_padding)
            tl.store(positions + at, tl.zeros([WIDTH], tl.int64), mask=is_padding)
            for group in tl.static_range(GROUPS):
                tl.store(slots + group * slots_stride + at, tl.full([WIDTH], -1, tl.int64), mask=is_padding)
        return
    if request >= num_requests:
        tl.store(query_starts + request + 1, num_tokens)
        tl.store(seq_lens + request, 1)
        return

    row = tl.load(rows + request).to(tl.int64)
    start, end = tl.load(starts + request), tl.load(starts + request + 1)
    length = tl.load(lengths + request)
    tl.store(query_starts + request + 1, end)
    tl.store(seq_lens + request, length)
    table = tables + row * row_stride
    drawn = tl.load(last_tokens + row)
    shift = tl.load(shifts + row)
    first = length - (end - start)
    for begin in range(start, end, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        is_token = at < end
        sent = tl.load(sent_ids + at, mask=is_token, other=0).to(tl.int64)
        tl.store(token_ids + at, tl.where(sent < 0, drawn, sent), mask=is_token)
        position = (first + at - start).to(tl.int64)
        tl.store(positions + at, position + shift, mask=is_token)
        for group in tl.static_range(GROUPS):
            block = tl.load(table + position // BLOCK * GROUPS + group, mask=is_token, other=0).to(tl.int64)
            tl.store(slots + group * slots_stride + at, block * BLOCK + position % BLOCK, mask=is_token)
    num_blocks = tl.cdiv(length, BLOCK)
    for begin in range(0, num_blocks, WIDTH):
        index = begin + tl.arange(0, WIDTH)
        is_block = index < num_blocks
        for group in tl.static_range(GROUPS):
            block = tl.load(table + index * GROUPS + group, mask=is_block)
            to = step_tables + group * tables_stride + request.to(tl.int64) * columns + index
            tl.store(to, block, mask=is_block)


@triton.jit
def list_pages(tables, query_starts, seq_lens, pages, columns, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Write the block ids of all requests one behind the other, those of one request. Grid: (requests,).

    A request without queries is padding and has none.

    Args:
        tables: [requests, columns] int32.
        query_starts: [requests + 1] int32. ``seq_lens``: [requests] int32.
        pages: [blocks of all requests] int32. Written.
        WIDTH: Requests or blocks that one turn of a loop reads.
    """
    request = tl.program_id(0)
    if tl.load(query_starts + request + 1) == tl.load(query_starts + request):
        return
    num_before = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, request, WIDTH):
        at = begin + tl.arange(0, WIDTH)
        is_before = at < request
        start = tl.load(query_starts + at, mask=is_before, other=0)
        has_queries = tl.load(query_starts + at + 1, mask=is_before, other=0) > start
        length = tl.load(seq_lens + at, mask=is_before & has_queries, other=0)
        num_before += tl.cdiv(length, BLOCK)
    first = tl.sum(num_before, 0).to(tl.int64)
    num_blocks = tl.cdiv(tl.load(seq_lens + request), BLOCK)
    for begin in range(0, num_blocks, WIDTH):
        index = begin + tl.arange(0, WIDTH)
        is_block = index < num_blocks
        block = tl.load(tables + request.to(tl.int64) * columns + index, mask=is_block)
        tl.store(pages + first + index, block, mask=is_block)

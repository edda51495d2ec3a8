"""Attends over a paged KV cache: one kernel for decodes, prefills and chunks of prompts in the same step.

A program computes a few consecutive queries of one request, for all query heads that share one KV head, over one part
of the keys ("split"). Which queries those are stands in a list that the host makes for each step, so the grid depends
on the list's length alone and a captured graph can replay any step that fits into it.

The running softmax is that of FlashAttention (Dao et al., 2022); splitting the keys of a long decode over several
programs, whose results a second kernel merges, that of Flash-Decoding (2023).
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["table_stride"])
def attend(
    query,
    keys,
    values,
    out,
    partial,
    sums,
    work,
    query_starts,
    seq_lens,
    block_tables,
    sinks,
    limits,
    scale,
    softcap,
    window,
    query_stride,
    table_stride,
    num_kv_heads,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
):
    """Compute the queries of one entry of ``work``, for one KV head and one part of the keys.

    Grid: (entries of ``work``, num_kv_heads, parts of the keys, of which there is one unless IS_SPLIT).

    Args:
        query: [T, num_kv_heads * GROUP, HEAD]; tokens lie ``query_stride`` elements apart.
        keys: [num_blocks, num_kv_heads, BLOCK, CACHE_HEAD], as are ``values``; of the queries' dtype or 8-bit floats.
            Zeros follow a head's HEAD elements.
        out: As query, contiguous. Written unless IS_SPLIT.
        partial: [T, num_heads, parts, PADDED_HEAD] float32: what a split found. Written if IS_SPLIT, as ``sums``.
        sums: [T, num_heads, parts, 2] float32: the largest score of a split, in powers of two, and its sum of weights.
        work: [entries, 2] int32: a request, -1 for an entry without any, and its first query that is computed.
        query_starts: [requests + 1] int32. ``seq_lens``: [requests] int32. ``block_tables``: [requests, table_stride].
        sinks: [num_heads] float32, read if HAS_SINKS.
        limits: [T] int32, read if HAS_LIMITS: the last position that a query sees, growing in a request; otherwise its
            own.
        window: A query sees so many keys, its own included. Read if HAS_WINDOW; as ``softcap`` if HAS_SOFTCAP.
        ROWS: Queries times query heads that one program computes.
        TILE: Keys that one turn of the loop reads.
    """
    entry, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    # From the host's list: searching query_starts here, as vLLM's kernel does, would cost every program several loads
    # that depend on each other. An entry without a request is padding, so a graph replays any step that fits.
    request = tl.load(work + 2 * entry)
    if request < 0:
        return
    first_query = tl.load(work + 2 * entry + 1)
    start = tl.load(query_starts + request)
    num_queries = tl.load(query_starts + request + 1) - start
    seq_len = tl.load(seq_lens + request)

    QUERIES: tl.constexpr = ROWS // GROUP
    rows = tl.arange(0, ROWS)
    queries = first_query + rows // GROUP
    is_row = (rows < QUERIES * GROUP) & (queries < num_queries)
    context = seq_len - num_queries
    positions = context + queries
    tokens = (start + queries).to(tl.int64)
    heads = head * GROUP + rows % GROUP
    num_heads = num_kv_heads * GROUP

    dims = tl.arange(0, PADDED_HEAD)
    q = tl.load(
        query + tokens[:, None] * query_stride + heads[:, None] * HEAD + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD)[None, :],
        other=0.0,
    )

    seen = positions
    end = tl.minimum(context + first_query + QUERIES, seq_len)
    if HAS_LIMITS:
        seen = tl.load(limits + tokens, mask=is_row, other=0)
        end = tl.maximum(end, tl.max(seen, 0) + 1)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(context + first_query - window + 1, 0)
    first_tile = begin // TILE
    per_split = tl.cdiv(tl.cdiv(end, TILE) - first_tile, num_splits)
    first_tile += split * per_split
    last_tile = tl.minimum(first_tile + per_split, tl.cdiv(end, TILE))

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - decided when the kernel is compiled, unlike the inner one
        if split == 0:
            largest = tl.load(sinks + heads, mask=is_row, other=0.0) * LOG2_E
            total += 1.0
    found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)

    table = block_tables + request.to(tl.int64) * table_stride
    places = first_tile * TILE + tl.arange(0, TILE)
    blocks = tl.load(table + places // BLOCK, mask=(places >= begin) & (places < end), other=0)
    for tile in tl.range(first_tile, last_tile):
        places = tile * TILE + tl.arange(0, TILE)
        # Blocks before a window, and slots behind the last token, may hold another request's values, or NaN.
        is_key = (places >= begin) & (places < end)
        offsets = ((blocks.to(tl.int64) * num_kv_heads + head) * BLOCK + places % BLOCK) * CACHE_HEAD
        # Those of the next tile, a turn ahead. A load that the loads of keys and values wait for in the same turn
        # takes stages of the loop, and left them one buffer each.
        blocks = tl.load(table + (places + TILE) // BLOCK, mask=places + TILE < end, other=0)
        at = offsets[:, None] + dims[None, :]
        if CACHE_HEAD == PADDED_HEAD:
            is_element = is_key[:, None]
        else:
            is_element = is_key[:, None] & (dims < CACHE_HEAD)[None, :]
        k = tl.load(keys + at, mask=is_element, other=0.0).to(q.dtype)
        v = tl.load(values + at, mask=is_element, other=0.0).to(q.dtype)

        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is right for infinite exp(2 x) too.
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        sees = is_key[None, :] & (places[None, :] <= seen[:, None])
        if HAS_WINDOW:
            sees = sees & (places[None, :] > positions[:, None] - window)
        scores = tl.where(sees, scores * LOG2_E, float("-inf"))

        new_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet: the difference of two infinities would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        found = found * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        largest = new_largest

    if not IS_SPLIT:
        result = found / total[:, None]
        tl.store(
            out + (tokens[:, None] * num_heads + heads[:, None]) * HEAD + dims[None, :],
            result.to(out.dtype.element_ty),
            mask=is_row[:, None] & (dims < HEAD)[None, :],
        )
    else:
        cell = (tokens * num_heads + heads) * num_splits + split
        tl.store(partial + cell[:, None] * PADDED_HEAD + dims[None, :], found, mask=is_row[:, None])
        tl.store(sums + 2 * cell, largest, mask=is_row)
        tl.store(sums + 2 * cell + 1, total, mask=is_row)


@triton.jit(do_not_specialize=["num_splits"])
def merge_splits(
    partial, sums, out, num_splits, HEAD: tl.constexpr, PADDED_HEAD: tl.constexpr, MOST_SPLITS: tl.constexpr
):
    """Merge what the splits of one token and head found; the arguments are those of :func:`attend`.

    Grid: (T * num_heads,). MOST_SPLITS is a power of two, at least ``num_splits``. Splits without keys have the sum 0.
    """
    cell = tl.program_id(0).to(tl.int64)
    splits, dims = tl.arange(0, MOST_SPLITS), tl.arange(0, PADDED_HEAD)
    is_split = splits < num_splits
    at = cell * num_splits + splits
    largest = tl.load(sums + 2 * at, mask=is_split, other=float("-inf"))
    totals = tl.load(sums + 2 * at + 1, mask=is_split, other=0.0)
    factors = tl.where(totals > 0.0, tl.exp2(largest - tl.max(largest, 0)), 0.0)
    found = tl.load(partial + at[:, None] * PADDED_HEAD + dims[None, :], mask=is_split[:, None], other=0.0)
    result = tl.sum(found * factors[:, None], 0) / tl.sum(totals * factors, 0)
    tl.store(out + cell * HEAD + dims, result.to(out.dtype.element_ty), mask=dims < HEAD)

"""Attends over a paged KV cache: one kernel for decodes, prefills and chunks of prompts in the same step.

A program computes a few consecutive queries of one request, for all query heads that share one KV head, over all keys
or over one of several parts of them. Which these are stands in a list that the host makes for each step, so the grid
depends on the list's length alone and a captured graph can replay any step that fits into it.

The running softmax is that of FlashAttention (Dao et al., 2022); splitting the keys of a long decode over several
programs that of Flash-Decoding (2023). The program that is done last merges what all of them found, so that no second
kernel begins and ends for it. Decodes that share the first blocks of their tables may have those read once for all of
them by a kernel that runs before (:func:`attend_shared`), as in Hydragen (Juravsky et al., 2024) and cascade inference.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_tiles(
    q,
    keys,
    values,
    table,
    head,
    num_kv_heads,
    begin,
    end,
    first_tile,
    last_tile,
    seen,
    positions,
    largest,
    total,
    found,
    scale,
    softcap,
    window,
    CACHE_HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attend to the keys from ``begin`` to ``end`` that lie in some tiles.

    Args:
        q: [ROWS, PADDED_HEAD].
        table: The block ids of the request whose keys these are.
        seen: [ROWS]: the last position that each row sees. ``positions``: [ROWS], its own; read if HAS_WINDOW.
        largest: [ROWS] float32: the largest score so far. ``total``: [ROWS] float32: the sum of weights so far.
        found: [ROWS, PADDED_HEAD] float32: the weighted sum of values so far.

    Returns the new ``largest``, ``total`` and ``found``.
    """
    dims = tl.arange(0, PADDED_HEAD)
    places = first_tile * TILE + tl.arange(0, TILE)
    blocks = tl.load(table + places // BLOCK, mask=(places >= begin) & (places < end), other=0)
    for tile in tl.range(first_tile, last_tile):
        places = tile * TILE + tl.arange(0, TILE)
        # Blocks before a window, and slots behind the last token, may hold another request's values, or NaN.
        is_key = (places >= begin) & (places < end)
        if PADDED_HEAD > 128:
            blocks = tl.load(table + places // BLOCK, mask=is_key, other=0)
        offsets = ((blocks.to(tl.int64) * num_kv_heads + head) * BLOCK + places % BLOCK) * CACHE_HEAD
        # Those of the next tile, a turn ahead, but with large heads, for which registers would not suffice. A load that
        # those of keys and values wait for in the same turn takes stages of the loop, and left them one buffer each.
        if PADDED_HEAD <= 128:
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
    return largest, total, found


@triton.jit
def merge(largest, total, found, partial, sums, cells, is_row, PADDED_HEAD: tl.constexpr):
    """Add what another program found, which lies in ``cells`` [ROWS] of ``partial`` and ``sums``, to a program's own.

    Returns the new ``largest``, ``total`` and ``found``, as :func:`attend_tiles` does.
    """
    dims = tl.arange(0, PADDED_HEAD)
    its_largest = tl.load(sums + 2 * cells, mask=is_row, other=float("-inf"))
    new_largest = tl.maximum(largest, its_largest)
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    decay, factor = tl.exp2(largest - base), tl.exp2(its_largest - base)
    its_total = tl.load(sums + 2 * cells + 1, mask=is_row, other=0.0)
    its_found = tl.load(partial + cells[:, None] * PADDED_HEAD + dims[None, :], mask=is_row[:, None], other=0.0)
    total = total * decay + its_total * factor
    return new_largest, total, found * decay[:, None] + its_found * factor[:, None]


@triton.jit(do_not_specialize=["table_stride"])
def attend(
    query,
    keys,
    values,
    out,
    partial,
    sums,
    arrived,
    work,
    query_starts,
    seq_lens,
    block_tables,
    sinks,
    limits,
    shares,
    shared_partial,
    shared_sums,
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
    CAN_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    SHARED_ROWS: tl.constexpr,
):
    """Compute the queries of one entry of ``work``, for one KV head.

    Grid: (entries of ``work``, num_kv_heads).

    Args:
        query: [T, num_kv_heads * GROUP, HEAD]; tokens lie ``query_stride`` elements apart.
        keys: [num_blocks, num_kv_heads, BLOCK, CACHE_HEAD], as are ``values``; of the queries' dtype or 8-bit floats.
            Zeros follow a head's HEAD elements.
        out: As query, contiguous.
        partial: [entries, num_heads, PADDED_HEAD] float32: what the query of a part of the keys found. Written, as the
            next two, if CAN_SPLIT.
        sums: [entries, num_heads, 2] float32: the largest score of a part, in powers of two, and its sum of weights.
        arrived: [entries, num_kv_heads] int32, zeros, which it leaves: how many parts are done, at the first of them.
        work: [entries, 4] int32: a request, -1 for an entry without any; its first query that is computed; which part
            of the keys, and of how many. Only one query has several parts, whose entries follow each other.
        query_starts: [requests + 1] int32. ``seq_lens``: [requests] int32. ``block_tables``: [requests, table_stride].
        sinks: [num_heads] float32, read if HAS_SINKS.
        limits: [T] int32, read if HAS_LIMITS: the last position that a query sees, growing in a request; otherwise its
            own.
        shares: [requests, 4] int32, read, as the next two, if SHARED_ROWS: how many tokens of a request
            :func:`attend_shared` has read; its first program that did so for the request, and how many did; and which
            of a program's queries was the request's. Requests with nothing to share have zeros.
        shared_partial: [programs, num_kv_heads, SHARED_ROWS, PADDED_HEAD] float32, as ``partial``; ``shared_sums``:
            [programs, num_kv_heads, SHARED_ROWS, 2].
        window: A query sees so many keys, its own included. Read if HAS_WINDOW; as ``softcap`` if HAS_SOFTCAP.
        ROWS: Queries times query heads that one program computes.
        TILE: Keys that one turn of the loop reads.
        SHARED_ROWS: ROWS of :func:`attend_shared`; 0: nothing is shared. Needs CAN_SPLIT, and steps that only decode.
    """
    entry, head = tl.program_id(0), tl.program_id(1)
    # From the host's list: searching query_starts here, as vLLM's kernel does, would cost every program several loads
    # that depend on each other. An entry without a request is padding, so a graph replays any step that fits.
    request = tl.load(work + 4 * entry)
    if request < 0:
        return
    first_query = tl.load(work + 4 * entry + 1)
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
    if SHARED_ROWS:
        begin = tl.load(shares + 4 * request)
    first_tile = begin // TILE
    last_tile = tl.cdiv(end, TILE)
    part, num_parts = 0, 1
    if CAN_SPLIT:
        part, num_parts = tl.load(work + 4 * entry + 2), tl.load(work + 4 * entry + 3)
        per_part = tl.cdiv(last_tile - first_tile, num_parts)
        first_tile += part * per_part
        last_tile = tl.minimum(first_tile + per_part, last_tile)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINKS:  # noqa: SIM102 - decided when the kernel is compiled, unlike the inner one
        if part == 0:
            largest = tl.load(sinks + heads, mask=is_row, other=0.0) * LOG2_E
            total += 1.0
    found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)
    if SHARED_ROWS:
        first_program = tl.load(shares + 4 * request + 1)
        num_programs = tl.where(part == 0, tl.load(shares + 4 * request + 2), 0)
        of_request = tl.load(shares + 4 * request + 3) * GROUP + rows
        for program in tl.range(first_program, first_program + num_programs):
            cells = (program * num_kv_heads + head).to(tl.int64) * SHARED_ROWS + of_request
            largest, total, found = merge(
                largest, total, found, shared_partial, shared_sums, cells, is_row, PADDED_HEAD
            )
    table = block_tables + request.to(tl.int64) * table_stride
    largest, total, found = attend_tiles(
        q,
        keys,
        values,
        table,
        head,
        num_kv_heads,
        begin,
        end,
        first_tile,
        last_tile,
        seen,
        positions,
        largest,
        total,
        found,
        scale,
        softcap,
        window,
        CACHE_HEAD,
        PADDED_HEAD,
        BLOCK,
        ROWS,
        TILE,
        HAS_WINDOW,
        HAS_SOFTCAP,
    )

    is_result = is_row
    if CAN_SPLIT:  # noqa: SIM102 - decided when the kernel is compiled, unlike the inner one
        if num_parts > 1:
            of_entry = (entry * num_kv_heads + head).to(tl.int64) * GROUP + rows
            tl.store(partial + of_entry[:, None] * PADDED_HEAD + dims[None, :], found, mask=is_row[:, None])
            tl.store(sums + 2 * of_entry, largest, mask=is_row)
            tl.store(sums + 2 * of_entry + 1, total, mask=is_row)
            # All threads have written before one says so, and who finds the number of the others sees their results.
            tl.debug_barrier()
            first = (entry - part) * num_kv_heads + head
            num_before = tl.atomic_add(arrived + first, 1)
            is_last = num_before == num_parts - 1
            is_result = is_row & is_last
            largest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            found = tl.zeros([ROWS, PADDED_HEAD], tl.float32)
            for other in tl.range(0, tl.where(is_last, num_parts, 0)):
                cells = (first + other * num_kv_heads).to(tl.int64) * GROUP + rows
                largest, total, found = merge(largest, total, found, partial, sums, cells, is_row, PADDED_HEAD)
            tl.store(arrived + first, 0, mask=is_last)
    tl.store(
        out + (tokens[:, None] * num_heads + heads[:, None]) * HEAD + dims[None, :],
        (found / total[:, None]).to(out.dtype.element_ty),
        mask=is_result[:, None] & (dims < HEAD)[None, :],
    )


@triton.jit(do_not_specialize=["table_stride"])
def attend_shared(
    query,
    keys,
    values,
    partial,
    sums,
    work,
    members,
    block_tables,
    scale,
    softcap,
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
    HAS_SOFTCAP: tl.constexpr,
):
    """Compute what several requests of one query each find in a part of the keys that they share, for one KV head.

    All of these keys come before the requests' own, so each query sees all of them. Grid: (entries of ``work``,
    num_kv_heads). :func:`attend` describes what is not described here.

    Args:
        partial: [entries, num_kv_heads, ROWS, PADDED_HEAD] float32. Written, as are the sums.
        sums: [entries, num_kv_heads, ROWS, 2] float32.
        work: [entries, 4] int32: the place of the program's first query in ``members``, -1 for an entry without any;
            how many tokens its requests share; which part of the keys, and of how many.
        members: int32: the requests of each program, ROWS // GROUP of them; behind the last of a group -1.
    """
    entry, head = tl.program_id(0), tl.program_id(1)
    place = tl.load(work + 4 * entry)
    if place < 0:
        return
    end = tl.load(work + 4 * entry + 1)
    part, num_parts = tl.load(work + 4 * entry + 2), tl.load(work + 4 * entry + 3)

    rows = tl.arange(0, ROWS)
    requests = tl.load(members + place + rows // GROUP, mask=rows < ROWS // GROUP * GROUP, other=-1)
    is_row = requests >= 0
    heads = head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_HEAD)
    q = tl.load(
        query + requests.to(tl.int64)[:, None] * query_stride + heads[:, None] * HEAD + dims[None, :],
        mask=is_row[:, None] & (dims < HEAD)[None, :],
        other=0.0,
    )

    num_tiles = tl.cdiv(end, TILE)
    per_part = tl.cdiv(num_tiles, num_parts)
    first_tile = part * per_part
    seen = tl.full([ROWS], 0, tl.int32) + end
    largest, total, found = attend_tiles(
        q,
        keys,
        values,
        block_tables + tl.load(members + place).to(tl.int64) * table_stride,
        head,
        num_kv_heads,
        0,
        end,
        first_tile,
        tl.minimum(first_tile + per_part, num_tiles),
        seen,
        seen,
        tl.full([ROWS], float("-inf"), tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, PADDED_HEAD], tl.float32),
        scale,
        softcap,
        0,
        CACHE_HEAD,
        PADDED_HEAD,
        BLOCK,
        ROWS,
        TILE,
        False,
        HAS_SOFTCAP,
    )
    cells = (entry * num_kv_heads + head).to(tl.int64) * ROWS + rows
    tl.store(partial + cells[:, None] * PADDED_HEAD + dims[None, :], found, mask=is_row[:, None])
    tl.store(sums + 2 * cells, largest, mask=is_row)
    tl.store(sums + 2 * cells + 1, total, mask=is_row)

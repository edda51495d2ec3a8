"""Computes prompts of a gated delta net in chunks: within a chunk by products of matrices, from chunk to chunk by the
state. Sums depend on where chunks begin, so a prompt has the same bits only if its cuts are ends of chunks.

A *chunk* is CHUNK tokens of a run, or the fewer that are left at its end. ``chunks`` [N, 2] int32 are its first token
and the one behind its last. ``read`` and ``written`` [runs] int32 are the slots of a run; a negative one of ``read``
stands for an empty state. ``run_chunks`` [runs + 1] int32 is where the chunks of a run begin, and ``chains``
[chains, 2] int32 which runs a chain has: each but the first reads the slot that the one before it writes.

Matrices in float32 are multiplied as PARTS matrices in the model's dtype: two, whose sum has lost a hundred-thousandth,
so that tensor cores read them from shared memory as they lie there; one, of a model in float32.
"""

import triton
import triton.language as tl

PASSES: tl.constexpr = tl.constexpr("tf32x3")
"""Of products of float32 by tensor cores."""


@triton.jit
def low_part(x, high):
    return (x - high.to(tl.float32)).to(high.dtype)


@triton.jit
def _multiply(a, a_low, b, b_low, PARTS: tl.constexpr):
    """Return the product of two matrices, each the sum of two parts."""
    if PARTS == 1:
        return tl.dot(a, b, input_precision=PASSES)
    return tl.dot(a_low, b, tl.dot(a, b_low, tl.dot(a, b)))


@triton.jit
def _multiply_wide(a, b, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Return the product of two matrices in float32."""
    a_high, b_high = a.to(KIND), b.to(KIND)
    return _multiply(a_high, low_part(a, a_high), b_high, low_part(b, b_high), PARTS)


@triton.jit
def store_parts(place, x, mask, size, KIND: tl.constexpr, PARTS: tl.constexpr):
    """Store a matrix, and ``size`` elements behind it what its elements have lost."""
    high = x.to(KIND)
    tl.store(place, high, mask=mask)
    if PARTS == 2:
        tl.store(place + size, low_part(x, high), mask=mask)


@triton.jit
def _own(array, begin, stride, head, size):
    """Return where a head's elements of the first token of a chunk lie: offsets from there have 32 bits, and take half
    the registers."""
    return array + (begin * stride + head * size)


@triton.jit
def _is_corner(rows, columns, size):
    """Return which elements lie below the diagonal blocks of ``size``, in those of twice the size."""
    return (rows // size == columns // size + 1) & (rows // size % 2 == 1)


@triton.jit
def sum_decays(
    decay, sums, rests, chunks, HEADS: tl.constexpr, KEY: tl.constexpr, PADDED_KEY: tl.constexpr, CHUNK: tl.constexpr
):
    """Sum the logarithms of decays, from the beginning of each chunk up to each token and from there to the end. Grid:
    (N, HEADS).

    Args:
        decay, sums, rests: [T, HEADS, KEY] float32; the token's own decay is in the sums, and not in the rests.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    tokens, keys = tl.arange(0, CHUNK), tl.arange(0, PADDED_KEY)
    base, at = (begin * HEADS + head) * KEY, tokens[:, None] * (HEADS * KEY) + keys[None, :]
    mask = (tokens < (end - begin).to(tl.int32))[:, None] & (keys < KEY)[None, :]
    logs = tl.load(decay + base + at, mask=mask, other=0.0)
    tl.store(sums + base + at, tl.cumsum(logs, 0), mask=mask)
    # Not the difference of two sums: near the end it would have lost what strong decays before it took.
    tl.store(rests + base + at, tl.cumsum(logs, 0, reverse=True) - logs, mask=mask)


@triton.jit
def delta_pairs(
    query,
    key,
    decay,
    beta,
    lower,
    found,
    factors,
    chunks,
    key_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Multiply the keys and the queries of each chunk with its keys. Grid: (N, HEADS).

    A decay of each channel, from one token to another, is cut at the border of blocks between them: both of its parts
    are at most 1, where the parts before and behind one fixed token would be infinite and zero.

    Args:
        query, key: [T, HEADS / GROUP, KEY], rows ``key_stride`` elements apart.
        decay: [T, HEADS] logarithms, or of BY_CHANNEL the sums of :func:`sum_decays`; beta: [T, HEADS]; float32.
        lower: [N, HEADS, CHUNK, CHUNK] float32, written: for a token's key that of each earlier one, decayed between
            them, times its beta.
        found: [N, HEADS, PARTS, CHUNK, CHUNK] in the model's dtype, written: the same of queries, with their own keys.
        factors: [N, HEADS, 2, CHUNK] float32, written: what makes keys, and queries, of unit length.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    tokens, count = tl.arange(0, CHUNK), (end - begin).to(tl.int32)
    is_token, rows, columns = tokens < count, tokens[:, None], tokens[None, :]
    KIND: tl.constexpr = key.dtype.element_ty
    own_keys = _own(key, begin, key_stride, head // GROUP, KEY)
    own_queries = _own(query, begin, key_stride, head // GROUP, KEY)
    key_squares, query_squares = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    key_pairs, query_pairs = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    for start in tl.range(0, PADDED_KEY, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        mask = is_token[:, None] & (keys < KEY)[None, :]
        at = rows * key_stride + keys[None, :]
        k, q = tl.load(own_keys + at, mask=mask, other=0.0), tl.load(own_queries + at, mask=mask, other=0.0)
        wide_k, wide_q = k.to(tl.float32), q.to(tl.float32)
        key_squares += tl.sum(wide_k * wide_k, 1)
        query_squares += tl.sum(wide_q * wide_q, 1)
        if BY_CHANNEL:
            own = decay + (begin * HEADS + head) * KEY
            logs = tl.load(own + (rows * (HEADS * KEY) + keys[None, :]), mask=mask, other=0.0)
            query_pairs += tl.where(rows == columns, tl.sum(wide_q * wide_k, 1)[:, None], 0.0)
            for level in tl.range(0, LEVELS):
                size = 1 << level
                before = tokens // size * size - 1
                last = tl.minimum(before + size, count - 1)
                at_before = before[:, None] * (HEADS * KEY) + keys[None, :]
                since = tl.exp(logs - tl.load(own + at_before, mask=mask & (before >= 0)[:, None], other=0.0))
                at_last = last[:, None] * (HEADS * KEY) + keys[None, :]
                until = tl.trans(wide_k * tl.exp(tl.load(own + at_last, mask=mask, other=0.0) - logs))
                is_corner = _is_corner(rows, columns, size)
                key_pairs += tl.where(is_corner, _multiply_wide(wide_k * since, until, KIND, PARTS), 0.0)
                query_pairs += tl.where(is_corner, _multiply_wide(wide_q * since, until, KIND, PARTS), 0.0)
        else:
            turned = tl.trans(k)
            key_pairs += tl.dot(k, turned, input_precision=PASSES)
            query_pairs += tl.dot(q, turned, input_precision=PASSES)
    of_key, of_query = tl.rsqrt(key_squares + eps), tl.rsqrt(query_squares + eps) * scale
    of_token = (begin * HEADS + head) + tokens * HEADS
    if not BY_CHANNEL:
        sums = tl.cumsum(tl.load(decay + of_token, mask=is_token, other=0.0), 0)
        # Above the diagonal a decay could be infinite, and is not used.
        between = tl.exp(tl.where(columns <= rows, sums[:, None] - sums[None, :], 0.0))
        key_pairs *= between
        query_pairs *= between
    key_pairs *= (of_key * tl.load(beta + of_token, mask=is_token, other=0.0))[:, None] * of_key[None, :]
    query_pairs *= of_query[:, None] * of_key[None, :]
    place, square = (chunk.to(tl.int64) * HEADS + head) * CHUNK, rows * CHUNK + columns
    tl.store(lower + place * CHUNK + square, tl.where(columns < rows, key_pairs, 0.0))
    queried, everywhere = tl.where(columns <= rows, query_pairs, 0.0), rows + columns >= 0
    store_parts(found + place * (PARTS * CHUNK) + square, queried, everywhere, CHUNK * CHUNK, KIND, PARTS)
    tl.store(factors + place * 2 + tokens, of_key)
    tl.store(factors + place * 2 + CHUNK + tokens, of_query)


@triton.jit
def delta_solve(
    query,
    key,
    value,
    decay,
    rests,
    beta,
    lower,
    factors,
    reading,
    asking,
    writing,
    changes,
    remaining,
    chunks,
    key_stride,
    value_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Solve for the changes of a chunk, up to the state S before it. Grid: (N, HEADS).

    A token's change is beta (v - k decay S'), where S' has the changes of the tokens before it. So the changes U of a
    chunk solve (1 + lower) U = beta (V - K S), with keys that are decayed since its beginning: U = changes - reading S.

    Args:
        value: [T, HEADS, VALUE], rows ``value_stride`` elements apart; the others: as in :func:`delta_pairs`.
        rests: [T, HEADS, KEY] of :func:`sum_decays`; only read if BY_CHANNEL.
        reading, asking, writing: [N, HEADS, PARTS, CHUNK, KEY] in the model's dtype, written: (1 + lower)⁻¹ beta K;
            queries, decayed since the beginning of the chunk; and keys, decayed to its end.
        changes: [N, HEADS, CHUNK, VALUE] float32, written: (1 + lower)⁻¹ beta V.
        remaining: [N, HEADS, KEY] float32, written: the decay of the state over the chunk.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1).to(tl.int64)
    tokens, count = tl.arange(0, CHUNK), (end - begin).to(tl.int32)
    is_token, rows, columns = tokens < count, tokens[:, None], tokens[None, :]
    KIND: tl.constexpr = key.dtype.element_ty
    place = (chunk.to(tl.int64) * HEADS + head) * CHUNK
    pairs = tl.load(lower + place * CHUNK + (rows * CHUNK + columns))
    # Blocks of twice the size each time: [[A, 0], [C, B]]⁻¹ = [[A⁻¹, 0], [-B⁻¹ C A⁻¹, B⁻¹]]. A sum of powers takes
    # fewer products, but those of a chunk of equal keys exceed what they cancel to by many orders of magnitude.
    inverse = tl.where(rows == columns, 1.0, 0.0)
    for level in tl.range(0, LEVELS):
        corner = tl.where(_is_corner(rows, columns, 1 << level), pairs, 0.0)
        inverse -= _multiply_wide(inverse, _multiply_wide(corner, inverse, KIND, PARTS), KIND, PARTS)
    of_token = (begin * HEADS + head) + tokens * HEADS
    inverse *= tl.load(beta + of_token, mask=is_token, other=0.0)[None, :]
    high = inverse.to(KIND)
    low = low_part(inverse, high)
    of_key, of_query = tl.load(factors + place * 2 + tokens), tl.load(factors + place * 2 + CHUNK + tokens)
    if not BY_CHANNEL:
        each = tl.load(decay + of_token, mask=is_token, other=0.0)
        sums, total = tl.cumsum(each, 0), tl.sum(each, 0)
        of_key_before, of_key_behind = of_key * tl.exp(sums), of_key * tl.exp(tl.cumsum(each, 0, reverse=True) - each)
        of_query *= tl.exp(sums)
    own_keys = _own(key, begin, key_stride, head // GROUP, KEY)
    own_queries = _own(query, begin, key_stride, head // GROUP, KEY)
    own_values = _own(value, begin, value_stride, head, VALUE)
    for start in tl.range(0, PADDED_KEY, BLOCK):
        keys = start + tl.arange(0, BLOCK)
        is_key = keys < KEY
        mask = is_token[:, None] & is_key[None, :]
        at = rows * key_stride + keys[None, :]
        k = tl.load(own_keys + at, mask=mask, other=0.0).to(tl.float32)
        q = tl.load(own_queries + at, mask=mask, other=0.0).to(tl.float32)
        if BY_CHANNEL:
            own, in_place = (begin * HEADS + head) * KEY, rows * (HEADS * KEY) + keys[None, :]
            sums = tl.load(decay + own + in_place, mask=mask, other=0.0)
            rest = tl.load(rests + own + in_place, mask=mask, other=0.0)
            total = tl.load(decay + own + (count - 1) * (HEADS * KEY) + keys, mask=is_key, other=0.0)
            before, behind = k * of_key[:, None] * tl.exp(sums), k * of_key[:, None] * tl.exp(rest)
            asked, left = q * of_query[:, None] * tl.exp(sums), tl.exp(total)
        else:
            before, behind = k * of_key_before[:, None], k * of_key_behind[:, None]
            asked, left = q * of_query[:, None], tl.exp(total + tl.zeros([BLOCK], tl.float32))
        high_before = before.to(KIND)
        read = _multiply(high, low, high_before, low_part(before, high_before), PARTS)
        there, in_place, size = place * (PARTS * KEY), rows * KEY + keys[None, :], CHUNK * KEY
        mask = is_key[None, :] & (rows >= 0)
        store_parts(reading + there + in_place, read, mask, size, KIND, PARTS)
        store_parts(asking + there + in_place, asked, mask, size, KIND, PARTS)
        store_parts(writing + there + in_place, behind, mask, size, KIND, PARTS)
        tl.store(remaining + (chunk.to(tl.int64) * HEADS + head) * KEY + keys, left, mask=is_key)
    for start in tl.range(0, PADDED_VALUE, BLOCK):
        values = start + tl.arange(0, BLOCK)
        is_value = (values < VALUE)[None, :]
        at = rows * value_stride + values[None, :]
        v = tl.load(own_values + at, mask=is_token[:, None] & is_value, other=0.0)
        if PARTS == 1:
            changed = tl.dot(high, v, input_precision=PASSES)
        else:
            changed = tl.dot(low, v, tl.dot(high, v))
        tl.store(changes + place * VALUE + (rows * VALUE + values[None, :]), changed, mask=is_value & (rows >= 0))


@triton.jit
def delta_chunks(
    found,
    reading,
    asking,
    writing,
    changes,
    remaining,
    states,
    out,
    read,
    written,
    run_chunks,
    chains,
    chunks,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Apply the gated delta rule, as ``StateOps.gated_delta`` states it, chunk by chunk, with what :func:`delta_pairs`
    and :func:`delta_solve` found. Grid: (chains, HEADS, VALUE / VALUES).

    Args:
        states: [slots, HEADS, KEY, VALUE] float32; out: [T, HEADS, VALUE]; the others: as there.
    """
    chain, head = tl.program_id(0), tl.program_id(1)
    tokens, keys = tl.arange(0, CHUNK), tl.arange(0, PADDED_KEY)
    values = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < KEY, values < VALUE
    is_element = is_key[:, None] & is_value[None, :]
    own_states, element = states + head * (KEY * VALUE), keys[:, None] * VALUE + values[None, :]
    first, last = tl.load(chains + 2 * chain), tl.load(chains + 2 * chain + 1)
    slot = tl.load(read + first).to(tl.int64)
    state = tl.load(own_states + slot * (HEADS * KEY * VALUE) + element, mask=is_element & (slot >= 0), other=0.0)
    of_key, of_value = tokens[:, None] * KEY + keys[None, :], tokens[:, None] * VALUE + values[None, :]
    turned, square = keys[:, None] + tokens[None, :] * KEY, tokens[:, None] * CHUNK + tokens[None, :]
    of_output = tokens[:, None] * (HEADS * VALUE) + (head * VALUE + values)[None, :]
    has_key, has_turned = is_key[None, :] & (tokens >= 0)[:, None], is_key[:, None] & (tokens >= 0)[None, :]
    has_value = is_value[None, :] & (tokens >= 0)[:, None]
    KIND: tl.constexpr = found.dtype.element_ty
    LOW: tl.constexpr = (PARTS - 1) * CHUNK
    for run in tl.range(first, last):
        start, stop = tl.load(run_chunks + run).to(tl.int64), tl.load(run_chunks + run + 1).to(tl.int64)
        for index in tl.range(0, stop - start):
            chunk = start + index
            begin, end = tl.load(chunks + 2 * chunk).to(tl.int64), tl.load(chunks + 2 * chunk + 1).to(tl.int64)
            place = (chunk * HEADS + head) * CHUNK
            at = place * (PARTS * KEY)
            high = state.to(KIND)
            low = low_part(state, high)
            w = tl.load(reading + at + of_key, mask=has_key, other=0.0)
            w_low = tl.load(reading + at + LOW * KEY + of_key, mask=has_key, other=0.0)
            change = tl.load(changes + place * VALUE + of_value, mask=has_value, other=0.0)
            change -= _multiply(w, w_low, high, low, PARTS)
            q = tl.load(asking + at + of_key, mask=has_key, other=0.0)
            q_low = tl.load(asking + at + LOW * KEY + of_key, mask=has_key, other=0.0)
            result = _multiply(q, q_low, high, low, PARTS)
            high = change.to(KIND)
            low = low_part(change, high)
            p = tl.load(found + place * (PARTS * CHUNK) + square)
            p_low = tl.load(found + place * (PARTS * CHUNK) + LOW * CHUNK + square)
            result += _multiply(p, p_low, high, low, PARTS)
            is_output = (tokens < (end - begin).to(tl.int32))[:, None] & is_value[None, :]
            tl.store(out + begin * (HEADS * VALUE) + of_output, result, mask=is_output)
            k = tl.load(writing + at + turned, mask=has_turned, other=0.0)
            k_low = tl.load(writing + at + LOW * KEY + turned, mask=has_turned, other=0.0)
            left = tl.load(remaining + (chunk * HEADS + head) * KEY + keys, mask=is_key, other=0.0)
            state = left[:, None] * state + _multiply(k, k_low, high, low, PARTS)
        target = tl.load(written + run).to(tl.int64)
        tl.store(own_states + target * (HEADS * KEY * VALUE) + element, state, mask=is_element)

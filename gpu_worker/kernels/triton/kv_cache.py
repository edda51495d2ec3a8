"""Fills the paged cache: normalizes and rotates the queries and keys of a step and writes keys and values, writes keys
and values that are not rotated, and copies blocks within a pool, from a pool into a packed buffer, or from such a
buffer into a pool."""

import triton
import triton.language as tl

LARGEST_FP8 = tl.constexpr(448.0)


@triton.jit
def within_fp8(x):
    """Return float32 in the range of 8-bit floats (e4m3), which have no infinity: NaN takes its place, as that of
    NaN."""
    exact = x.to(tl.float32)
    within = tl.clamp(exact, -LARGEST_FP8, LARGEST_FP8)
    return tl.where(tl.abs(exact) < float("inf"), within, float("nan"))


@triton.jit
def write_kv(
    key,
    value,
    slots,
    keys,
    values,
    key_stride,
    value_stride,
    HEAD: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Store one head of one token's key and value. Grid: (T, num_kv_heads).

    key, value: [T, num_kv_heads, HEAD], whose tokens lie a stride apart; the other arguments are those of
    ``rotate_and_write``.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dims = tl.arange(0, PADDED_HEAD)
    is_dim = dims < HEAD
    at = ((slot // BLOCK * tl.num_programs(1) + head) * BLOCK + slot % BLOCK) * CACHE_HEAD + dims
    stored_key = tl.load(key + token * key_stride + head * HEAD + dims, mask=is_dim)
    stored_value = tl.load(value + token * value_stride + head * HEAD + dims, mask=is_dim)
    if IS_FP8:
        stored_key, stored_value = within_fp8(stored_key), within_fp8(stored_value)
    tl.store(keys + at, stored_key.to(keys.dtype.element_ty), mask=is_dim)
    tl.store(values + at, stored_value.to(values.dtype.element_ty), mask=is_dim)


@triton.jit
def rotate_and_write(
    heads,
    weights,
    cosines,
    sines,
    slots,
    keys,
    values,
    eps,
    shift,
    num_heads,
    num_kv_heads,
    HAS_NORM: tl.constexpr,
    HEAD: tl.constexpr,
    CACHE_HEAD: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    """Compute HEADS heads of one token. Queries replace themselves in ``heads``; keys and values go to their slot.

    Grid: (T, all heads / HEADS, rounded up).

    Args:
        heads: [T, num_heads + 2 * num_kv_heads, HEAD]: queries, keys, values.
        weights: [num_heads + num_kv_heads, HEAD], of an RMSNorm of each head, read if HAS_NORM.
        IS_FP8: Whether the cache has 8-bit floats, whose range keys and values are limited to.
        cosines: [T, HEAD / 2] float32, as are ``sines``.
        slots: [T] int64: block id * BLOCK + place in it; negative: keys and values of the token are not written.
        keys: [num_blocks, num_kv_heads, BLOCK, CACHE_HEAD], as are ``values``.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    num_rotated = num_heads + num_kv_heads
    num_all = num_rotated + num_kv_heads
    HALF: tl.constexpr = HEAD // 2
    dims = tl.arange(0, PADDED_HALF)
    is_rotated = head < num_rotated
    is_dim = (dims < HALF)[None, :]
    is_element = (head < num_all)[:, None] & is_dim

    at = (token * num_all + head)[:, None] * HEAD + dims[None, :]
    # All loads come before the stores: a program overwrites its own heads only.
    stored_first = tl.load(heads + at, mask=is_element, other=0.0)
    stored_second = tl.load(heads + at + HALF, mask=is_element, other=0.0)
    first, second = stored_first.to(tl.float32), stored_second.to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / HEAD + eps)[:, None]
        at_weight = head[:, None] * HEAD + dims[None, :]
        is_weight = is_rotated[:, None] & is_dim
        first = first * scale * (tl.load(weights + at_weight, mask=is_weight, other=0.0).to(tl.float32) + shift)
        second = (
            second * scale * (tl.load(weights + at_weight + HALF, mask=is_weight, other=0.0).to(tl.float32) + shift)
        )
    cos = tl.load(cosines + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    sin = tl.load(sines + token * HALF + dims, mask=dims < HALF, other=0.0)[None, :]
    turned_first = (first * cos - second * sin).to(stored_first.dtype)
    turned_second = (second * cos + first * sin).to(stored_first.dtype)

    is_query = (head < num_heads)[:, None] & is_dim
    tl.store(heads + at, turned_first, mask=is_query)
    tl.store(heads + at + HALF, turned_second, mask=is_query)

    slot = tl.load(slots + token)
    place = slot % BLOCK
    kv_head = tl.where(is_rotated, head - num_heads, head - num_rotated)
    at_cache = ((slot // BLOCK * num_kv_heads + kv_head) * BLOCK + place)[:, None] * CACHE_HEAD + dims[None, :]
    if IS_FP8:
        turned_first, turned_second = within_fp8(turned_first), within_fp8(turned_second)
        stored_first, stored_second = within_fp8(stored_first), within_fp8(stored_second)
    dtype = keys.dtype.element_ty
    is_key = ((head >= num_heads) & is_rotated & (slot >= 0))[:, None] & is_dim
    tl.store(keys + at_cache, turned_first.to(dtype), mask=is_key)
    tl.store(keys + at_cache + HALF, turned_second.to(dtype), mask=is_key)
    is_value = ((head >= num_rotated) & (head < num_all) & (slot >= 0))[:, None] & is_dim
    tl.store(values + at_cache, stored_first.to(dtype), mask=is_value)
    tl.store(values + at_cache + HALF, stored_second.to(dtype), mask=is_value)


@triton.jit
def copy_blocks(
    source,
    target,
    source_blocks,
    target_blocks,
    words,
    source_block_stride,
    source_region_stride,
    target_block_stride,
    target_region_stride,
    WORDS: tl.constexpr,
):
    """Copy WORDS words of one region of one block.

    Grid: (blocks, regions, words / WORDS, rounded up). Strides and sizes count int64 words. A region is what a block
    has in one place: the keys of a layer, or its values.

    Args:
        source, target: The memory as int64 words.
        source_blocks, target_blocks: [blocks] int64: where each block is on either side.
        words: How many words a region of a block has.
    """
    index, region = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.program_id(2) * WORDS + tl.arange(0, WORDS)
    is_word = columns < words
    source_block, target_block = tl.load(source_blocks + index), tl.load(target_blocks + index)
    at_source = source_block * source_block_stride + region * source_region_stride + columns
    at_target = target_block * target_block_stride + region * target_region_stride + columns
    tl.store(target + at_target, tl.load(source + at_source, mask=is_word), mask=is_word)

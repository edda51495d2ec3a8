"""Normalizes and rotates the queries and keys of a step, and writes keys and values to the paged cache."""

import triton
import triton.language as tl

from .write_kv import within_fp8


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

"""Writes keys and values that are not rotated to the paged cache."""

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

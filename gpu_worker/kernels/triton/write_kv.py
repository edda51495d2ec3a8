"""Writes keys and values that are not rotated to the paged cache."""

import triton
import triton.language as tl


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
    tl.store(keys + at, tl.load(key + token * key_stride + head * HEAD + dims, mask=is_dim), mask=is_dim)
    tl.store(values + at, tl.load(value + token * value_stride + head * HEAD + dims, mask=is_dim), mask=is_dim)

"""Adds the last part's result to the residual stream and applies RMSNorm, in one pass."""

import triton
import triton.language as tl


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

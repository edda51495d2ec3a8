"""Changes rows: adds the last part's result to the residual stream and applies RMSNorm, in one pass, computes gates,
and rounds rows to 8-bit floats, each by a scale of its own."""

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

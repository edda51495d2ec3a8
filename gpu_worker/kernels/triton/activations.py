"""Computes the activations that gates have, in float32."""

import triton
import triton.language as tl


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

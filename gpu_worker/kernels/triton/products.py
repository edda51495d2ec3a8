"""Multiplies rows by matrices, and computes the activations that gates have, in float32.

The first product is of at most 16 rows: what a decode step of few requests does, limited by reading the weights. Each
program streams the weights of a few outputs through shared memory once, at 16 bytes a load. Up to 16 rows cost the
same, because a matrix instruction takes 16.

The second multiplies rows by the matrices of their experts: one launch for all experts, whatever the router chose. The
places of the rows are sorted by expert and padded so that each tile belongs to one expert (as in vLLM's fused experts).
Sizes depend on how many rows there are alone, so nothing waits for the router's choice on the host.
"""

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


MOST_ROWS = 16


@triton.jit(do_not_specialize=["num_rows"])
def few_rows(
    x,
    weight,
    scales,
    bias,
    out,
    num_rows,
    inputs,
    outputs,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    EVEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute COLUMNS outputs of all rows.

    Grid: (outputs / COLUMNS, rounded up). A row's result does not depend on the other rows.

    Args:
        x: [num_rows, inputs]; num_rows is at most 16.
        weight: [outputs, inputs]; with an activation [2 * outputs, inputs], all gates before the ups.
        scales: [rows of ``weight``] float32, factors on 8-bit floats, read if HAS_SCALES.
        bias: As many numbers as ``weight`` has rows, read if HAS_BIAS.
        out: [num_rows, outputs]: the product; with an activation activation(gates) * ups.
        KIND: The activation, see ``activations.activate``; "none": there is none.
        EVEN: Whether COLUMNS divides ``outputs`` and DEPTH ``inputs``.
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    rows, depth = tl.arange(0, 16), tl.arange(0, DEPTH)
    is_row, is_column = rows < num_rows, columns < outputs
    found = tl.zeros([16, COLUMNS], tl.float32)
    ups = tl.zeros([16, COLUMNS], tl.float32)
    at_x = rows[:, None] * inputs + depth[None, :]
    at_weight = columns.to(tl.int64)[:, None] * inputs + depth[None, :]
    at_up = (columns + outputs).to(tl.int64)[:, None] * inputs + depth[None, :]
    for begin in tl.range(0, inputs, DEPTH):
        if EVEN:
            part = tl.load(x + at_x + begin, mask=is_row[:, None], other=0.0)
            matrix = tl.load(weight + at_weight + begin, eviction_policy="evict_first").to(part.dtype)
            if KIND != "none":
                other = tl.load(weight + at_up + begin, eviction_policy="evict_first").to(part.dtype)
                ups = tl.dot(part, tl.trans(other), ups, input_precision="ieee")
        else:
            is_deep = (depth + begin < inputs)[None, :]
            part = tl.load(x + at_x + begin, mask=is_row[:, None] & is_deep, other=0.0)
            matrix = tl.load(weight + at_weight + begin, mask=is_column[:, None] & is_deep, other=0.0).to(part.dtype)
            if KIND != "none":
                other = tl.load(weight + at_up + begin, mask=is_column[:, None] & is_deep, other=0.0).to(part.dtype)
                ups = tl.dot(part, tl.trans(other), ups, input_precision="ieee")
        found = tl.dot(part, tl.trans(matrix), found, input_precision="ieee")
    if HAS_SCALES:
        found *= tl.load(scales + columns, mask=is_column, other=0.0)[None, :]
        if KIND != "none":
            ups *= tl.load(scales + outputs + columns, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        found += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if KIND != "none":
        if HAS_BIAS:
            ups += tl.load(bias + outputs + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        # Rounded as the product, the activation and the product with the ups are when they are three operations.
        dtype = x.dtype.element_ty
        active = activate(found.to(dtype).to(tl.float32), KIND).to(dtype).to(tl.float32)
        found = active * ups.to(dtype).to(tl.float32)
    tl.store(
        out + rows[:, None] * outputs + columns[None, :],
        found.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )


@triton.jit(do_not_specialize=["num_places"])
def grouped_product(
    x,
    weights,
    scales,
    out,
    places,
    experts,
    num_places,
    inputs,
    outputs,
    SHARE: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Compute COLUMNS outputs of ROWS rows of one expert.

    Grid: (tiles, outputs / COLUMNS, rounded up).

    Args:
        x: [num_places / SHARE, inputs]: place p reads row p / SHARE.
        weights: [experts, outputs, inputs].
        scales: [experts, outputs] float32, factors on 8-bit floats, read if HAS_SCALES.
        out: [num_places, outputs].
        places: [tiles * ROWS] int32: a place, or num_places where a tile is padded.
        experts: [tiles] int32: the expert of a tile, -1 for a tile without rows.
        EVEN: Whether DEPTH divides ``inputs`` and COLUMNS ``outputs``.
    """
    tile = tl.program_id(0)
    expert = tl.load(experts + tile)
    if expert < 0:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    is_column = columns < outputs
    place = tl.load(places + tile * ROWS + tl.arange(0, ROWS))
    is_row = place < num_places
    at_x = (place // SHARE).to(tl.int64)[:, None] * inputs + depth[None, :]
    at_weight = (expert.to(tl.int64) * outputs + columns)[:, None] * inputs + depth[None, :]
    found = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in tl.range(0, inputs, DEPTH):
        if EVEN:
            part = tl.load(x + at_x + begin, mask=is_row[:, None], other=0.0)
            matrix = tl.load(weights + at_weight + begin).to(part.dtype)
        else:
            is_deep = (depth + begin < inputs)[None, :]
            part = tl.load(x + at_x + begin, mask=is_row[:, None] & is_deep, other=0.0)
            matrix = tl.load(weights + at_weight + begin, mask=is_column[:, None] & is_deep, other=0.0).to(part.dtype)
        found = tl.dot(part, tl.trans(matrix), found, input_precision="ieee")
    if HAS_SCALES:
        found *= tl.load(scales + expert.to(tl.int64) * outputs + columns, mask=is_column, other=0.0)[None, :]
    tl.store(
        out + place.to(tl.int64)[:, None] * outputs + columns[None, :],
        found.to(out.dtype.element_ty),
        mask=is_row[:, None] & is_column[None, :],
    )

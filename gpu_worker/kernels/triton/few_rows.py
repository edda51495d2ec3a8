"""Multiplies at most 16 rows by a matrix: what a decode step of few requests does, limited by reading the weights.

Each program streams the weights of a few outputs through shared memory once, at 16 bytes a load. Up to 16 rows cost the
same, because a matrix instruction takes 16.
"""

import triton
import triton.language as tl

from .activations import activate

MOST_ROWS = 16


@triton.jit
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

"""Multiplies rows by the matrices of their experts: one launch for all experts, whatever the router chose.

The places of the rows are sorted by expert and padded so that each tile belongs to one expert (as in vLLM's fused
experts). Sizes depend on how many rows there are alone, so nothing waits for the router's choice on the host.
"""

import triton
import triton.language as tl


@triton.jit
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

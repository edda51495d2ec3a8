"""Rounds rows to 8-bit floats, each by a scale of its own."""

import triton
import triton.language as tl

from .write_kv import LARGEST_FP8


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

"""Pixels are read as they were written, and nothing else is."""

import os

import numpy as np
import pytest

from tokenloom.services.encoder.pixel_slots import PixelPart, PixelSlots, read_pixels, write_pixels

PIXELS = {
    "pixel_values": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "image_grid_thw": np.array([[1, 2, 3]]),
    "mask": np.array([True, False]),
    "none": np.zeros((0, 3), np.float32),
}


def test_what_was_written_is_read() -> None:
    slots = PixelSlots(1)
    slot = slots.take()
    parts = write_pixels(slot, PIXELS)
    read = read_pixels(slot, parts)
    for name, values in PIXELS.items():
        assert read[name].dtype == values.dtype
        assert np.array_equal(read[name], values)
    write_pixels(slot, {"small": np.zeros(1, np.float32)})
    assert os.fstat(slot).st_size == 4
    slots.give_back(slot)
    assert os.fstat(slot).st_size == 0, "the memory is given back"
    slots.close()


@pytest.mark.parametrize(
    "part",
    [
        PixelPart("a", "float32", (2,), 0),
        PixelPart("a", "float32", (1,), 4),
        PixelPart("a", "float32", (1,), -4),
        PixelPart("a", "float32", (1 << 40,), 0),
        PixelPart("a", "float32", (1 << 40, 1 << 40), 0),
        PixelPart("a", "float32", (-1,), 0),
        PixelPart("a", "object", (1,), 0),
    ],
)
def test_parts_that_do_not_lie_there_are_refused(part: PixelPart) -> None:
    slots = PixelSlots(1)
    slot = slots.take()
    write_pixels(slot, {"a": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=r"a |fewer"):
        read_pixels(slot, [part])
    slots.close()

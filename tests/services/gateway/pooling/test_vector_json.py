"""Tests how results are written."""

import json
import struct
from base64 import b64decode

import pytest

from tokenloom.services.gateway.mesh.pooled_outputs import PooledResult
from tokenloom.services.gateway.pooling.vector_json import floats, numbers, result_blocks

LARGE = 20_000
"""Numbers that take several blocks."""


def _result(*shape: int) -> tuple[PooledResult, list[float]]:
    count = 1
    for size in shape:
        count *= size
    values = [index / 8 for index in range(count)]
    return PooledResult(shape, struct.pack(f"<{count}f", *values)), values


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 3), (LARGE,), (2, LARGE)])
def test_numbers_have_the_shape_of_the_result(shape: tuple[int, ...]) -> None:
    result, values = _result(*shape)
    blocks = list(result_blocks(result, as_base64=False))
    assert max(map(len, blocks)) < 256 << 10
    expected: object = values if shape else values[0]
    if len(shape) == 2:
        expected = [values[row * shape[1] : (row + 1) * shape[1]] for row in range(shape[0])]
    assert json.loads(b"".join(blocks)) == expected


@pytest.mark.parametrize("count", [1, 3, 400_000])
def test_base64_holds_the_bytes(count: int) -> None:
    result, _ = _result(count)
    assert b64decode(json.loads(b"".join(result_blocks(result, as_base64=True)))) == result.data


def test_floats_invert_numbers() -> None:
    assert numbers(floats([0.5, -2.0])) == [0.5, -2.0]

"""Writes results as JSON, in blocks that take about a millisecond each."""

import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Iterator

from ..encoding.sse import encode_json
from ..mesh.pooled_outputs import PooledResult

_NUMBERS = 8192
_BASE64_BYTES = 3 << 18
"""Divisible by three, so that blocks join to one text."""


def numbers(data: bytes) -> list[float]:
    """Return float32 numbers, little-endian, as Python's."""
    values = array("f", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def floats(values: Iterable[float]) -> bytes:
    """Invert :func:`numbers`."""
    data = array("f", values)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def result_blocks(result: PooledResult, *, as_base64: bool) -> Iterator[bytes]:
    """Yield the JSON of a result: a number, a list, a list of rows, or base64 of all numbers."""
    if as_base64:
        yield b'"'
        for start in range(0, len(result.data), _BASE64_BYTES):
            yield b64encode(result.data[start : start + _BASE64_BYTES])
        yield b'"'
    elif not result.shape:
        yield encode_json(numbers(result.data)[0])
    elif len(result.shape) == 1:
        yield from _row(result.data)
    else:
        width = len(result.data) // max(result.shape[0], 1)
        yield b"["
        for row in range(result.shape[0]):
            yield from _row(result.data[row * width : (row + 1) * width], b"," if row else b"")
        yield b"]"


def _row(data: bytes, before: bytes = b"") -> Iterator[bytes]:
    yield before + b"["
    for start in range(0, len(data), 4 * _NUMBERS):
        inner = encode_json(numbers(data[start : start + 4 * _NUMBERS]))[1:-1]
        yield b"," + inner if start else inner
    yield b"]"

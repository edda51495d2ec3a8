"""Counts and builds large JSON texts in slices, within limits of what they may hold.

The decoder holds the interpreter's lock, so a thread alone would not keep the event loop running: what a body holds is
counted before any of it is built, in slices of a few milliseconds, and long lists of token ids are built in slices.
"""

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tokenloom.request import errors

MAX_CONTAINERS = 1 << 15
"""Limits the objects and arrays of a large body: ten for each of more messages than a conversation has."""
MAX_STRINGS = 1 << 16
"""Limits the strings of a large body, names included."""
MAX_VALUES = 1 << 19
"""Limits the values of a large body next to its long lists of numbers, which are token ids."""
MAX_NUMBERS = 3 << 19
"""Limits all values of a large body: more than fit into 8 MiB of token ids with five digits."""
SLICE_BYTES = 256 << 10
"""Counted at a time, less than a millisecond."""
PAUSE_SECONDS = 0.0005
"""Between two slices: the event loop, which needs the interpreter's lock after each system call, gets it at once."""
_LONG_LIST_BYTES = 1 << 20
_LIST_SLICE_BYTES = 256 << 10

Data = bytes | bytearray

_raw_items = msgspec.json.Decoder(list[msgspec.Raw])


def check_amount(data: Data) -> int:
    """Count what a JSON text holds and return how many values it has, at least.

    Raises ``InvalidArgument`` for more than a body may hold, as soon as that much was counted.
    """
    num_containers = num_quotes = num_values = 0
    for quotes, outside in _outside_strings(data):
        time.sleep(PAUSE_SECONDS)
        num_quotes += quotes
        num_containers += outside.count(b"{") + outside.count(b"[")
        num_values += outside.count(b",")
        for count, most, what in (
            (num_containers, MAX_CONTAINERS, "objects and arrays"),
            (num_quotes // 2, MAX_STRINGS, "strings"),
            (num_values, MAX_NUMBERS, "values"),
        ):
            if count > most:
                raise errors.InvalidArgument(f"the body holds more than {most} {what}; split the request")
    return num_values


def _outside_strings(data: Data) -> Iterator[tuple[int, bytes]]:
    """Yield, for each slice of a JSON text, how many strings begin or end in it, and what lies outside of them.

    Stops early in a slice that exceeds the limit of strings: then the text outside is empty.
    """
    in_string = False
    start = 0
    while start < len(data):
        piece = bytes(data[start : _slice_end(data, start)])
        start += len(piece)
        if b"\\" in piece:  # drop escapes, of backslashes first, so that every quote left begins or ends a string
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        num_quotes = piece.count(b'"')
        if num_quotes > 2 * MAX_STRINGS + 1:
            yield num_quotes, b""
            return
        yield num_quotes, b"".join(piece.split(b'"')[in_string::2])
        in_string ^= num_quotes % 2 == 1


def _slice_end(data: Data, start: int) -> int:
    """Return the end of a slice: it does not divide an escape."""
    end = start + SLICE_BYTES
    if end >= len(data):
        return len(data)
    num_backslashes = end - start - len(data[start:end].rstrip(b"\\"))
    return end - num_backslashes % 2


def build_value(raw: msgspec.Raw, num_values: int) -> Any:
    """Build the value of one field. ``num_values``: of the whole body."""
    data = memoryview(raw)
    if num_values <= MAX_VALUES or len(data) < _LONG_LIST_BYTES:
        return msgspec.json.decode(data)
    source = bytes(data)
    if source[:1] != b"[" or b'"' in source or b"{" in source:
        return msgspec.json.decode(_checked(source))
    if b"[" not in source[1:]:
        return _numbers(source)
    items = (bytes(memoryview(part)) for part in _raw_items.decode(source))
    return [_numbers(item) if item[:1] == b"[" else msgspec.json.decode(item) for item in items]


def _checked(source: bytes) -> bytes:
    if sum(outside.count(b",") for _, outside in _outside_strings(source)) > MAX_VALUES:
        raise errors.InvalidArgument(f"the body holds more than {MAX_VALUES} values; split the request")
    return source


def _numbers(source: bytes) -> list[Any]:
    """Build a list that was checked to be JSON and holds no strings; in slices, between which other threads run."""
    if len(source) <= _LIST_SLICE_BYTES or b"[" in source[1:]:
        value: list[Any] = msgspec.json.decode(source)
        return value
    numbers: list[Any] = []
    start, last = 1, len(source) - 1
    while start < last:
        end = source.find(b",", start + _LIST_SLICE_BYTES, last)
        end = last if end < 0 else end
        time.sleep(PAUSE_SECONDS)
        numbers += msgspec.json.decode(b"[%b]" % source[start:end])
        start = end + 1
    return numbers

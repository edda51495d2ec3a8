"""Decodes the JSON bodies of requests: large ones in a thread, within limits of what they may hold, known fields only.

The decoder holds the interpreter's lock, so a thread alone would not keep the event loop running: what a body holds is
counted before any of it is built, in slices of a few milliseconds, and long lists of token ids are built in slices.
"""

import asyncio
import re
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from tokenloom.request import errors

OFF_LOOP_BYTES = 128 << 10
"""Larger bodies are decoded and read in a thread."""
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
_DECODER_ERRORS = (RecursionError, UnicodeDecodeError, msgspec.DecodeError)
_STOPPED_AT = re.compile(r"\(byte (\d+)\)")
_HALF_PAIR = re.compile(rb"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F]|(?:\\(?:u[dD]?)?)?\Z)")
"""Matches the escape of a high surrogate that no low one follows, unless the text ends there."""

T = TypeVar("T")
Data = bytes | bytearray

_raw_items = msgspec.json.Decoder(list[msgspec.Raw])


class BodyParser:
    """Decodes bodies and reads them, one large body at a time; the bodies that wait are bounded by their bytes."""

    def __init__(self, names: Collection[str], ignored: Collection[str]) -> None:
        """Args:
        names: The fields that some endpoint reads. Of large bodies, others are not built.
        ignored: Known fields that no endpoint reads; their values are never built from large bodies.
        """
        fields = [(name, msgspec.Raw, msgspec.UNSET) for name in {*names, *ignored}]
        self._names = tuple(names)
        self._ignored = tuple({*ignored} - {*names})
        self._lenient = msgspec.json.Decoder(msgspec.defstruct("KnownFields", fields))
        self._strict = msgspec.json.Decoder(msgspec.defstruct("KnownFields", fields, forbid_unknown_fields=True))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="body parser")

    async def read(self, data: Data, read: Callable[[dict[str, Any]], T]) -> T:
        """Decode a body and return what ``read`` makes of it. Raises what ``read`` raises, and ``InvalidArgument``.

        Of a large body, ``read`` gets the known fields and the name of one unknown field; it is called in a thread.
        Fields without effect have the value True there.
        """
        if len(data) <= OFF_LOOP_BYTES:
            return read(decode_object(data))
        # The decoder holds the interpreter's lock: 8 MB of `{},` took 0.2 to 0.34 s and 400 MB in one piece, thread or
        # not.
        return await self.run(lambda: read(self._decode(data)))

    async def run(self, call: Callable[[], T]) -> T:
        """Call in the thread, after the calls that wait already."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def close(self) -> None:
        """End the thread; calls that wait are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decode(self, data: Data) -> dict[str, Any]:
        num_values = check_amount(data)
        try:
            return self._build(data, num_values)
        except _DECODER_ERRORS as error:
            raise _invalid(error, data) from None

    def _build(self, data: Data, num_values: int) -> dict[str, Any]:
        fields, unknown = self._known_fields(data)
        body: dict[str, Any] = dict.fromkeys(unknown, True)
        for name in self._ignored:
            raw = getattr(fields, name)
            if raw is not msgspec.UNSET and bytes(memoryview(raw)[:5]) != b"null":
                body[name] = True
        for name in self._names:
            raw = getattr(fields, name)
            if raw is not msgspec.UNSET:
                try:
                    body[name] = _value(raw, num_values)
                except _DECODER_ERRORS as error:
                    raise _invalid(error, memoryview(raw)) from None
        return body

    def _known_fields(self, data: Data) -> tuple[msgspec.Struct, list[str]]:
        """Return the fields' JSON, and the name of one unknown field if the body has any."""
        try:
            return self._strict.decode(data), []
        except msgspec.ValidationError as error:
            _, is_unknown, rest = str(error).partition("unknown field `")
            if not is_unknown:
                raise errors.InvalidArgument("the body must be a JSON object") from None
            return self._lenient.decode(data), [rest.removesuffix("`")]


def decode_object(data: Data) -> dict[str, Any]:
    """Return the JSON object in ``data``, which should not be large.

    Raises ``InvalidArgument`` for anything else, NaN, infinities, numbers beyond float64, bad UTF-8 and deep nesting.
    """
    try:
        value = msgspec.json.decode(data)
    except _DECODER_ERRORS as error:
        raise _invalid(error, data) from None
    if not isinstance(value, dict):
        raise errors.InvalidArgument("the body must be a JSON object")
    return value


def _invalid(error: Exception, data: Data | memoryview) -> errors.InvalidArgument:
    """Return the client's error for one of the decoder's about ``data``."""
    if isinstance(error, RecursionError):
        return errors.InvalidArgument("the body is nested too deeply")
    if isinstance(error, UnicodeDecodeError):
        return errors.InvalidArgument("the body is not valid UTF-8")
    # What the decoder says of half a pair depends on what follows: truncated data, or the end of an escape. It is
    # searched for only where the decoder stopped: a search of 8 MB takes 0.3 s under the interpreter's lock.
    stopped = _STOPPED_AT.search(str(error))
    at = int(stopped[1]) if stopped else len(data)
    if half := _HALF_PAIR.search(data[max(at - 64, 0) : at + 12]):
        return errors.InvalidArgument(f"the body is not valid JSON: {half[1].decode()} is half a surrogate pair")
    return errors.InvalidArgument(f"the body is not valid JSON: {error}")


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


def _value(raw: msgspec.Raw, num_values: int) -> Any:
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

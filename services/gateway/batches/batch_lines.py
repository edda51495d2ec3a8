"""Reads the lines of a batch's input, and writes the lines of its results."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

import msgspec

MAX_ID = 512
"""Limits the characters of ``custom_id``."""
ID_DIGITS = 10
_HEAD = b'{"id":"batch_req_'
"""Begins every line of results; the number of the line that it answers follows in :data:`ID_DIGITS` digits."""
EXPIRED = "batch_expired"
"""The code of a request for which the time of its batch was over."""
_EXPIRED = b'"response":null,"error":{"code":"%b",' % EXPIRED.encode()
"""Is in the lines of such requests only: within a text the quotes are escaped."""


class _Line(msgspec.Struct):
    """A line of the input. Members of other names are ignored."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Body(msgspec.Struct):
    """What a batch must know of a body."""

    stream: Any = None
    background: Any = None


_line = msgspec.json.Decoder(_Line)
_body = msgspec.json.Decoder(_Body)


@dataclass(frozen=True, slots=True)
class LineRequest:
    """Holds a request of the input.

    Attributes:
        number: Of the line, from 1.
        custom_id: The client's name for the request.
        body: The JSON object to send.
    """

    number: int
    custom_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class LineError:
    """Says what is wrong with a line of the input."""

    number: int
    custom_id: str
    code: str
    message: str


class InputLines:
    """Reads the requests of a file, in order. To be called in one thread at a time; it waits for the disk.

    Attributes:
        number: Of the last line that was read.
    """

    def __init__(self, file: BinaryIO, endpoint: str, max_line_bytes: int) -> None:
        self.number = 0
        self._file = file
        self._endpoint = endpoint
        self._max_line_bytes = max_line_bytes
        self._ids: set[bytes] = set()  # digests, so that long ids take no memory; bounded by the lines of the file

    def take(self, max_bytes: int) -> list[LineRequest | LineError]:
        """Return the next requests: at least one, and at most about ``max_bytes`` of them; empty at the end."""
        taken: list[LineRequest | LineError] = []
        size = 0
        while size < max_bytes and (line := self._next()) is not None:
            size += len(line)
            if line.strip():
                taken.append(self._read(line))
        return taken

    def count(self, most: int) -> int:
        """Return how many requests are left, or a number above ``most``, also for a file of many empty lines."""
        number = 0
        while number <= most and (line := self._next()) is not None:
            if self.number > 2 * most:
                return most + 1
            number += bool(line.strip())
        return number

    def _next(self) -> bytes | None:
        """Return a line, or the beginning of one that is too long; None at the end."""
        line = self._file.readline(self._max_line_bytes + 1)
        if not line:
            return None
        self.number += 1
        rest = line
        while len(rest) > self._max_line_bytes and not rest.endswith(b"\n"):
            rest = self._file.readline(self._max_line_bytes + 1)
        return line

    def _read(self, line: bytes) -> LineRequest | LineError:
        number = self.number
        if len(line) > self._max_line_bytes and not line.endswith(b"\n"):
            return self._wrong("", "line_too_long", f"has more than {self._max_line_bytes} bytes")
        try:
            read = _line.decode(line)
        except msgspec.ValidationError as error:
            return self._wrong("", "invalid_request", f"is not a request of a batch: {error}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._wrong("", "invalid_json_line", f"is not valid JSON: {error}")
        except RecursionError:
            return self._wrong("", "invalid_json_line", "is nested too deeply")
        name = read.custom_id[:MAX_ID]
        if (problem := self._problem(read)) is not None:
            return self._wrong(name, *problem)
        digest = blake2b(name.encode(errors="surrogatepass"), digest_size=16).digest()
        if digest in self._ids:
            return self._wrong(name, "duplicate_custom_id", "has the custom_id of an earlier line")
        self._ids.add(digest)
        return LineRequest(number, name, bytes(read.body))

    def _problem(self, read: _Line) -> tuple[str, str] | None:
        """Return the code and the description of what is wrong with a line."""
        if not 0 < len(read.custom_id) <= MAX_ID:
            return "invalid_custom_id", f"must have a custom_id of 1 to {MAX_ID} characters"
        if read.method != "POST":
            return "invalid_method", "must have the method POST"
        if read.url != self._endpoint:
            return "mismatched_url", f"must have the url of the batch, {self._endpoint}"
        try:
            body = _body.decode(read.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return "invalid_body", "must have a body that is a JSON object"
        if body.stream or body.background:
            return "invalid_body", "must have a body without stream and background"
        return None

    def _wrong(self, custom_id: str, code: str, message: str) -> LineError:
        return LineError(self.number, custom_id, code, f"line {self.number} {message}")


def answer_line(batch_id: str, request: LineRequest, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of a request that was answered, with success or an error. ``body``: JSON."""
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _result(batch_id, request.number, request.custom_id, response, None)


def error_line(batch_id: str, error: LineError) -> bytes:
    """Return the line of a request that was not sent."""
    return _result(batch_id, error.number, error.custom_id, None, {"code": error.code, "message": error.message})


def expiry_of(request: LineRequest) -> LineError:
    """Return what becomes of a request for which the time of its batch was over."""
    message = "this request was not executed before the completion window expired"
    return LineError(request.number, request.custom_id, EXPIRED, message)


def results_in(file: BinaryIO) -> Iterator[tuple[int, bool]]:
    """Yield of each complete line of a file of results the number of the input's line that it answers, and whether that
    expired.

    Stops at what is no such line: a crash may leave the last one incomplete. Afterwards the file is positioned behind
    the last complete line.
    """
    end = file.tell()
    begin = len(_HEAD)
    for line in iter(lambda: file.readline(), b""):
        digits = line[begin : begin + ID_DIGITS]
        if not (line.startswith(_HEAD) and digits.isdigit() and line.endswith(b"}\n")):
            break
        end += len(line)
        yield int(digits), _EXPIRED in line
    file.seek(end, os.SEEK_SET)


def _result(
    batch_id: str, number: int, custom_id: str, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    line = {
        "id": f"batch_req_{number:0{ID_DIGITS}d}_{batch_id.removeprefix('batch_')}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"

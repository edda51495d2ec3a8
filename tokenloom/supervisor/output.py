"""Copies the output of the parts to the user line by line, each with the name of its part."""

import io
import os
import select
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

WriteLine = Callable[[str, str], None]
"""Takes the name of a part and one line of its output; called from two threads, one line at a time."""

_COLOURS = {
    "gateway": 36,
    "tokenizer": 35,
    "output_processor": 34,
    "coordinator": 33,
    "engine": 32,
    "encoder": 31,
    "relay": 37,
}
_NAME_WIDTH = len("output_processor-0")
_LONGEST_LINE = 64 * 1024


class _Lines:
    """Divides what comes out of a pipe into lines; one that is too long is cut."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rest = bytearray()

    def take(self, data: bytes) -> Iterator[str]:
        """Yield the lines that end with this piece; an empty one is the end of the pipe, and ends the last line."""
        self._rest += data
        while self._rest:
            end = self._rest.find(b"\n", 0, _LONGEST_LINE) + 1
            if not end and data and len(self._rest) < _LONGEST_LINE:
                return
            end = end or _LONGEST_LINE
            yield self._rest[:end].decode(errors="replace").rstrip("\r\n")
            del self._rest[:end]


class LineCopier:
    """Copies all streams in one thread. The pipes are the only buffers: a stalled terminal stalls the parts, as it
    would without a supervisor.

    A log that cannot be written stalls and ends nothing: its lines are counted, and the next line that can be written
    follows one that says how many are missing.
    """

    def __init__(self, write_line: WriteLine) -> None:
        self._write_line = write_line
        self._lock = threading.Lock()
        self._num_lost = 0
        self._why_lost = ""
        self._streams: selectors.BaseSelector | None = None  # made with the first one, behind the forks of the parts
        self._thread: threading.Thread | None = None  # None: there is no stream
        self._threading = threading.Lock()
        self._last_line = time.monotonic()

    def open(self, name: str) -> int:
        """Return a file descriptor for a part's output; the caller closes its own copy after the part has started."""
        read_end, write_end = os.pipe()
        try:
            self.follow(name, read_end)
        except (RuntimeError, OSError):  # no thread or descriptor is left: the part is started again later
            os.close(read_end)
            os.close(write_end)
            raise
        return write_end

    def follow(self, name: str, read_end: int) -> None:
        """Copy what a part writes to a pipe, and close the pipe's end."""
        with self._threading:
            if self._streams is None:
                self._streams = selectors.DefaultSelector()
            if self._thread is None:
                thread = threading.Thread(target=self._copy, args=(self._streams,), name="logs", daemon=True)
                thread.start()
                self._thread = thread
            # The thread may be waiting for the others already: epoll and kqueue take one more meanwhile.
            self._streams.register(read_end, selectors.EVENT_READ, _Lines(name))

    def quiet_seconds(self) -> float:
        """Return how long ago the last line was written."""
        return time.monotonic() - self._last_line

    def say(self, name: str, text: str) -> None:
        """Write a line of the supervisor."""
        with self._lock:
            self._last_line = time.monotonic()
            try:
                self._write(name, text)
            # A log that could not be written once ended the whole mesh. Lost lines are counted instead, and the log
            # says how many.
            except (OSError, ValueError) as error:  # a full disk, a reader that went away; ValueError: closed
                self._num_lost += 1
                self._why_lost = getattr(error, "strerror", None) or str(error)

    def _write(self, name: str, text: str) -> None:
        if self._num_lost:
            missing = f"{self._num_lost} lines are missing here: the log could not be written ({self._why_lost})"
            self._write_line(name, missing)
            self._num_lost = 0
        self._write_line(name, text)

    def close(self, timeout: float = 1.0) -> None:
        """Wait until the output of ended parts is written."""
        if (thread := self._thread) is not None:
            thread.join(timeout)

    def _copy(self, streams: selectors.BaseSelector) -> None:
        while self._has_streams(streams):
            for key, _ in streams.select():
                data = os.read(key.fd, _LONGEST_LINE)
                for line in key.data.take(data):
                    self.say(key.data.name, line)
                if not data:
                    streams.unregister(key.fd)
                    os.close(key.fd)

    def _has_streams(self, streams: selectors.BaseSelector) -> bool:
        """Return whether the thread goes on."""
        with self._threading:
            if not streams.get_map():
                self._thread = None
            return self._thread is not None


def unbuffered(stream: TextIO) -> TextIO:
    """Return a stream to the same file without a buffer, in which lines that cannot be written would stay; a stream
    without a descriptor is returned as it is."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return stream
    stream.flush()
    raw = _WholeWrites(descriptor, "wb", closefd=False)
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors="backslashreplace", write_through=True)


class _WholeWrites(io.FileIO):
    """Writes all that it is given, or raises ``OSError``.

    The system may take a part of it, and none from a terminal or pipe that another process has made non-blocking: then
    this waits, as it would for a blocking one.
    """

    def write(self, data: "ReadableBuffer", /) -> int:
        left = memoryview(data).cast("B")
        while left:
            if (taken := super().write(left)) is None:
                select.select((), (self,), ())
            else:
                left = left[taken:]
        return memoryview(data).nbytes


def prefixed(stream: TextIO) -> WriteLine:
    """Return a function that writes ``name | line``, coloured by service on a terminal."""
    colour = stream.isatty() and "NO_COLOR" not in os.environ

    def write_line(name: str, line: str) -> None:
        prefix = f"{name:<{_NAME_WIDTH}} |"
        if colour:
            prefix = f"\x1b[{_COLOURS.get(name.rpartition('-')[0], 37)}m{prefix}\x1b[0m"
        stream.write(f"{prefix} {line}\n")  # at once: a disk that is full in between must not cut the line
        stream.flush()

    return write_line


def bare(stream: TextIO) -> WriteLine:
    """Return a function that writes lines unchanged, for logs that machines read."""

    def write_line(name: str, line: str) -> None:
        stream.write(f"{line}\n")
        stream.flush()

    return write_line


class Tail:
    """Keeps the last lines to show them after a failure."""

    def __init__(self, lines: int = 40) -> None:
        self._lines: deque[str] = deque(maxlen=lines)

    def __call__(self, name: str, line: str) -> None:
        self._lines.append(f"{name:<{_NAME_WIDTH}} | {line}")

    def text(self) -> str:
        return "\n".join(self._lines)

"""Reads files with one JSON object a line, and writes them so that an interrupted command can resume."""

import contextlib
import fcntl
import io
import itertools
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..failures import CommandFailed

STANDARD = Path("-")
"""Stands for standard input or output."""
MAX_LINE_CHARS = 128 << 20
"""Characters of a line with its end: more than a prompt of a million tokens with its embeddings in base64 needs."""
MAX_DEPTH = 200
"""Objects and lists within each other; more would exceed Python's recursion where a line is read or written."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1, for `parse`. Raises `CommandFailed`."""
    with _opened(path) as stream:
        for number in itertools.count(1):
            line = stream.readline(MAX_LINE_CHARS + 1)
            if len(line) > MAX_LINE_CHARS:  # such as /dev/full, which has no end of a line
                raise CommandFailed(f"line {number} of {path} has more than {MAX_LINE_CHARS:,} characters")
            if not line:
                return
            if line.strip():
                yield number, line


def parse(line: str) -> Any:
    """Return the value of a line. Raises ``ValueError`` that says what is wrong with it."""
    if not line.isascii():
        try:
            # Read with escapes and refused line by line: decoded strictly, one bad line would end the whole batch.
            line.encode()  # bytes that were no text were read as halves of surrogate pairs
        except UnicodeEncodeError:
            raise ValueError("is not UTF-8 text") from None
    try:
        value = json.loads(line)
    except RecursionError:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep") from None
    except ValueError:
        raise ValueError("is not JSON") from None
    if line.count("[") + line.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"is nested more than {MAX_DEPTH} deep")
    return value


def check_apart(read: Path, written: Path, what: str) -> None:
    """Raise `CommandFailed` if the file of answers is the one that is read, which holds ``what``."""
    with contextlib.suppress(OSError):  # neither of two files that do not exist is the other
        if STANDARD not in (read, written) and read.samefile(written):
            raise CommandFailed(f"{written} is the file of {what}: name another file for the answers")


def count_lines(path: Path) -> int | None:
    """Return how many lines `read_lines` yields; None where they can be read only once, as from a pipe."""
    if path == STANDARD or path.is_fifo() or path.is_char_device():
        return None
    return sum(1 for _ in read_lines(path))


class LineWriter:
    """Appends objects to a file that only one process at a time may write. Use as ``with``.

    An incomplete last line of an interrupted process is removed at the start; ``written`` holds the objects before it.
    With ``overwrite`` the old lines stay until the first new one is written, or there is none to write.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Raises `CommandFailed` if the file cannot be written, is being written, or does not hold JSON lines."""
        self._stream = sys.stdout if path == STANDARD else _locked(path)
        self.written: list[dict[str, Any]] = []
        self._is_old = False
        try:
            if path == STANDARD or not stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode):
                return  # such as a pipe, which holds no lines
            # Not emptied yet: old answers give way to the first new one, so that a run which fails at once, for a wrong
            # server, has cost none of them.
            self._is_old = overwrite
            if not overwrite:
                end, self.written = _whole_lines(path)
                self._stream.truncate(end)
        except BaseException:
            self._close()
            raise

    def write(self, value: dict[str, Any]) -> None:
        """Write the line to the operating system, so that a killed process does not lose it."""
        self._empty()
        text = json.dumps(value, ensure_ascii=False)
        try:
            text.encode(self._stream.encoding)
        except UnicodeEncodeError:  # half a surrogate pair, or a terminal's encoding: JSON's escapes write them
            text = json.dumps(value)
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def _empty(self) -> None:
        if self._is_old:
            self._stream.truncate(0)
            self._is_old = False

    def _close(self) -> None:
        if self._stream is not sys.stdout:
            self._stream.close()

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._empty()
        finally:
            self._close()


def _depth(value: object) -> int:
    """Return how deep lists and objects are nested; a number or a text has depth 0."""
    level, depth = [value], 0
    while level := [each for each in level if isinstance(each, (dict, list))]:
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return depth


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if path == STANDARD:
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
        yield sys.stdin
        return
    try:
        stream = open(path, encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 - closed below
    except OSError as error:
        raise CommandFailed(f"cannot read {path}: {error.strerror}") from None
    with stream:
        yield stream


def _locked(path: Path) -> TextIO:
    try:
        stream = open(path, "a", encoding="utf-8")  # noqa: SIM115 - the writer closes it
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stream.close()
        raise CommandFailed(f"{path} is in use by another process") from None
    return stream


def _whole_lines(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the offset after the last complete line, and the lines."""
    end, found = 0, []
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                break
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise CommandFailed(f"{path}, line {number} is not a JSON object; name another file or use --overwrite")
            end += len(line)
            found.append(value)
    return end, found

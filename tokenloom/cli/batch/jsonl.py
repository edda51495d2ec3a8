"""Reads files with one JSON object a line, and writes them so that an interrupted command can resume."""

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ..failures import CommandFailed

STANDARD = Path("-")
"""Stands for standard input or output."""


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not blank, with their numbers from 1. Raises `CommandFailed`."""
    with _opened(path) as stream:
        try:
            for number, line in enumerate(stream, 1):
                if line.strip():
                    yield number, line
        except UnicodeDecodeError:
            raise CommandFailed(f"{path} is not UTF-8 text") from None


def count_lines(path: Path) -> int | None:
    """Return how many lines `read_lines` yields; None for standard input, which can be read only once."""
    return None if path == STANDARD else sum(1 for _ in read_lines(path))


class LineWriter:
    """Appends objects to a file that only one process at a time may write. Use as ``with``.

    An incomplete last line of an interrupted process is removed at the start; ``written`` holds the objects before it.
    """

    def __init__(self, path: Path, *, overwrite: bool = False) -> None:
        """Raises `CommandFailed` if the file cannot be written, is being written, or does not hold JSON lines."""
        self._stream = sys.stdout if path == STANDARD else _locked(path)
        self.written: list[dict[str, Any]] = []
        if path == STANDARD:
            return
        try:
            if overwrite:
                self._stream.truncate(0)
            end, self.written = _whole_lines(path)
            self._stream.truncate(end)
        except BaseException:
            self._stream.close()
            raise

    def write(self, value: dict[str, Any]) -> None:
        """Write the line to the operating system, so that a killed process does not lose it."""
        print(json.dumps(value, ensure_ascii=False), file=self._stream, flush=True)

    def __enter__(self) -> "LineWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not sys.stdout:
            self._stream.close()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    if path == STANDARD:
        yield sys.stdin
        return
    try:
        stream = open(path, encoding="utf-8")  # noqa: SIM115 - closed below
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
            except ValueError:
                value = None
            if not isinstance(value, dict):
                raise CommandFailed(f"{path}, line {number} is not a JSON object; name another file or use --overwrite")
            end += len(line)
            found.append(value)
    return end, found

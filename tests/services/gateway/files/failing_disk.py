"""A disk that runs its calls in the event loop, and that fails where a test wants it to."""

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import pytest

WRITES = ("open", "write", "fsync", "replace", "unlink", "ftruncate")
"""The functions of ``os`` by which the gateway changes what is on disk."""


class InlineThreads(Executor):
    """Runs each call at once, so that a test takes the same course each time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Crashed(BaseException):
    """Stands for the end of the process: what is written after it never reaches the disk."""


class Writes:
    """Counts the changes of what is on disk. From the one with the number ``crash_at`` on, none has an effect.

    Attributes:
        count: How many there were.
        is_full: Whether the disk has no room: nothing can be written.
        is_broken: Whether nothing at all can be changed.
    """

    def __init__(self, crash_at: int | None = None) -> None:
        self.count = 0
        self.is_full = self.is_broken = False
        self._crash_at = crash_at

    @property
    def has_crashed(self) -> bool:
        return self._crash_at is not None and self.count > self._crash_at

    @contextmanager
    def watched(self) -> Iterator["Writes"]:
        """Watch every write of this process for the length of the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in WRITES:
                patch.setattr(os, name, self._watched(name, getattr(os, name)))
            yield self

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **kwargs)
            if self.is_full and name == "write":
                raise OSError(errno.ENOSPC, "No space left on device")
            if self.is_broken:
                raise OSError(errno.EIO, "Input/output error")
            self.count += 1
            if not self.has_crashed:
                return real(*args, **kwargs)
            if name == "write" and self.count == (self._crash_at or 0) + 1:
                real(args[0], bytes(args[1])[: len(args[1]) // 2])  # the half of it
            raise Crashed

        return watched

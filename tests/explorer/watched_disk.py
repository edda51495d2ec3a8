"""Watches the accesses of a folder on disk: counts them, lets them fail, and ends the process at one of them."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .plan import Fault, Plan
from .thread_calls import Crashed, pause_thread

_COUNTED = re.compile(r"\.[0-9]+(?=\.)")
"""Numbers in names that count what the whole process has written, so that they differ from run to run."""
_NEEDS_ROOM = ("open", "write", "mkdir")
_REMOVES = ("unlink", "remove", "rmdir")
"""They work on a broken disk too: what could not be removed is what a crash leaves, which the next start removes."""
_BY_PATH = ("replace", "rename", "unlink", "remove", "mkdir", "rmdir", "link")
_BY_DESCRIPTOR = ("write", "ftruncate", "fsync")
_BROKEN = (*_NEEDS_ROOM, *(name for name in (*_BY_PATH, *_BY_DESCRIPTOR) if name not in _REMOVES))


class _Last(Crashed):
    """Raised in the access during which the process ends."""


def _ignore(*_: object) -> None:
    """Do nothing: the process has ended."""


class WatchedDisk:
    """Replaces the calls of the operating system that change files, for the files of one folder.

    Attributes:
        num_accesses: Changes so far.
        may_be_full: The plan may let it be full from now on: a process that begins may refuse to begin then.
        has_failed: Whether an access found the disk full, or broken.
        is_off: The process has ended; nothing is changed any more.
    """

    def __init__(
        self, directory: Path, plan: Plan, note: Callable[[str], None], on_crash: Callable[[], object]
    ) -> None:
        """``note``: takes a line of the trace. ``on_crash``: called when the process ends."""
        self._directory = str(directory)
        self._plan = plan
        self._note = note
        self._on_crash = on_crash
        self._names: dict[int, str] = {}  # open descriptors
        self.num_accesses = 0
        self.may_be_full = self.has_failed = self.is_off = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch for the length of the ``with``; then close what is open, as the end of a process does."""
        originals = {name: getattr(os, name) for name in ("open", "close", *_BY_PATH, *_BY_DESCRIPTOR)}
        try:
            for name, call in originals.items():
                setattr(os, name, self._watch(name, call))
            yield
        finally:
            for name, call in originals.items():
                setattr(os, name, call)
            for descriptor in self._names:
                with suppress(OSError):
                    os.close(descriptor)
            # Finalizers that the run has made keep the call to close that they were given, and so this object: with the
            # loop behind it, none of the run was ever collected, and its descriptors stayed open.
            self._note = self._on_crash = _ignore

    def _watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if name == "open":
            return lambda path, flags, *more, **options: self._open(call, path, flags, *more, **options)
        if name == "close":
            return lambda descriptor: self._close(call, descriptor)
        if name == "write":
            return lambda descriptor, data: self._write(call, descriptor, data)
        if name in _BY_DESCRIPTOR:

            def by_descriptor(descriptor: int, *more: Any) -> Any:
                if (path := self._names.get(descriptor)) is not None:
                    self._access(name, path)
                return call(descriptor, *more)

            return by_descriptor

        def by_path(path: Any, *more: Any, **options: Any) -> Any:
            if self._is_watched(path):
                self._access(name, os.fspath(path))
            return call(path, *more, **options)

        return by_path

    def _is_watched(self, path: object) -> bool:
        return isinstance(path, str | os.PathLike) and str(os.fspath(path)).startswith(self._directory)

    def _open(self, call: Callable[..., int], path: Any, flags: int, *more: Any, **options: Any) -> int:
        if not self._is_watched(path):
            return call(path, flags, *more, **options)
        if flags & (os.O_CREAT | os.O_TRUNC):
            self._access("open", os.fspath(path))
        descriptor = call(path, flags, *more, **options)
        self._names[descriptor] = os.fspath(path)
        return descriptor

    def _close(self, call: Callable[[int], None], descriptor: int) -> None:
        self._names.pop(descriptor, None)
        call(descriptor)

    def _write(self, call: Callable[..., int], descriptor: int, data: Any) -> int:
        if (path := self._names.get(descriptor)) is None:
            return call(descriptor, data)
        try:
            self._access("write", path)
        except (_Last, OSError):
            call(descriptor, bytes(data)[: len(data) // 2])  # a half arrives
            raise
        return call(descriptor, data)

    def _access(self, name: str, path: str) -> None:
        """Count an access that is about to happen. Raises what the plan says."""
        pause_thread()
        if self.is_off:
            raise Crashed
        number, self.num_accesses = self.num_accesses, self.num_accesses + 1
        plan = self._plan
        self._note(f"    {number}: {name} {_COUNTED.sub('', os.path.relpath(path, self._directory))}")
        if plan.fault is Fault.CRASH and number == plan.fault_at:
            self._note("    the process ends here")
            self.is_off = True
            self._on_crash()
            raise _Last
        fails = plan.fault is Fault.FULL and self.may_be_full and name in (_BROKEN if plan.is_broken else _NEEDS_ROOM)
        if fails and 0 <= number - plan.fault_at < plan.num_full:
            why = errno.EIO if plan.is_broken else errno.ENOSPC
            self._note(f"    {os.strerror(why)}")
            self.has_failed = True
            raise OSError(why, os.strerror(why), path)

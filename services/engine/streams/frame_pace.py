"""When a stream's next frame may go: steps that follow each other closely share one."""

import asyncio
from collections.abc import Callable
from typing import Protocol

_GRAIN_SECONDS = 0.001
"""Event loops keep time in milliseconds: what is due within one is due."""


class _Loop(Protocol):
    """What is needed of an event loop."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle: ...


class FramePace:
    """A frame costs each service on its way about as much for one step as for two."""

    def __init__(self, interval: float, wake: Callable[[], None], loop: _Loop) -> None:
        """``interval``: seconds between frames, at least; 0: any. ``wake`` is called when one that waited is due."""
        self._interval = interval
        self._wake = wake
        self._loop = loop
        self._next_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def is_due(self, *, urgent: bool) -> bool:
        """Whether a frame may go now, as an ``urgent`` one always may. If not, ``wake`` will be called."""
        if urgent or not self._interval:
            return True
        wait = self._next_at - self._loop.time()
        if wait < _GRAIN_SECONDS:
            return True
        if self._timer is None:
            self._timer = self._loop.call_later(wait, self._ring)
        return False

    def sent(self) -> None:
        """A frame goes now."""
        if self._interval:
            self._next_at = self._loop.time() + self._interval

    def close(self) -> None:
        """``wake`` is not called any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self._wake()

"""Measures silence without counting the time for which this process itself was busy."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

T = TypeVar("T")

QUIET_SECONDS: Final = 10.0
"""How long a call may bring nothing until its peer is asked whether it is there."""
ANSWER_SECONDS: Final = 10.0
"""How long a peer that is asked may take, on a busy machine."""
LONGEST_TURN_SECONDS = 0.5
"""As long as the time between two looks of a timer counts at most: what the peer sent in a longer one has not been read
yet."""


def is_late(due: float) -> bool:
    """Return whether this process was stopped or starved when a timer of the running event loop was due: what came
    meanwhile has not been read yet, and what the timer would end may be wanted."""
    return asyncio.get_running_loop().time() - due > LONGEST_TURN_SECONDS


class LivenessTimer:
    """Measures how long a peer has owed something: a sign of life, credit, the end of a step.

    Attributes:
        owed: Seconds, as of the last look. The reader of what was owed sets it to zero.
    """

    def __init__(self, read: Callable[[], float] | None = None) -> None:
        """``read`` returns seconds since no particular moment; None for the time of the running event loop."""
        # A process that was itself starved for 10 s has not read what its peers sent meanwhile. Counting that time as
        # their silence once ended every stream of a busy gateway; so a pause counts as one short turn.
        self._read = read or asyncio.get_running_loop().time
        self._looked_at = self._read()
        self.owed = 0.0

    def look(self, *, owes: bool) -> float:
        """Return :attr:`owed`, which grows if the peer owes something now, and is zero otherwise. To be called at least
        every :data:`LONGEST_TURN_SECONDS`."""
        now = self._read()
        self.owed = self.owed + min(now - self._looked_at, LONGEST_TURN_SECONDS) if owes else 0.0
        self._looked_at = now
        return self.owed


async def answered(call: Awaitable[T], ask: Callable[[], Awaitable[object]], quiet: float = QUIET_SECONDS) -> T:
    """Return what a call returns, however long that takes while its peer is there.

    A peer that is stopped, or cut off, ends a call by itself; one whose event loop hangs does not. So ``ask``, which a
    peer answers at once, is called whenever the call has brought nothing for ``quiet`` seconds. Raises
    ``TimeoutError``, and cancels the call, if it fails or takes longer than :data:`ANSWER_SECONDS`.
    """
    waiting = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait((waiting,), timeout=quiet))[0]:
            await _ask(waiting, ask)
        return waiting.result()
    finally:
        await _end(waiting)


async def _ask(waiting: "asyncio.Future[T]", ask: Callable[[], Awaitable[object]]) -> None:
    """Return once ``ask`` is answered, or what waits has ended."""
    asked, timer = asyncio.ensure_future(ask()), LivenessTimer()
    turn = min(LONGEST_TURN_SECONDS, ANSWER_SECONDS)
    try:
        while not (await asyncio.wait((waiting, asked), timeout=turn, return_when=asyncio.FIRST_COMPLETED))[0]:
            if timer.look(owes=True) >= ANSWER_SECONDS:
                raise TimeoutError("the peer is silent")
        if not waiting.done() and asked.exception() is not None:
            raise TimeoutError("the peer does not answer") from asked.exception()
    finally:
        await _end(asked)


async def _end(task: "asyncio.Future[Any]") -> None:
    """Cancel a task unless it has ended, and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # so that asyncio does not log it as never seen

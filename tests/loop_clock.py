"""Lets time pass for the timers of an event loop without waiting for it."""

import asyncio
import time
from asyncio.base_events import BaseEventLoop


def _time(loop: BaseEventLoop) -> float:
    return time.monotonic() + getattr(loop, "seconds_ahead", 0.0)


# The method of all loops, not of one that runs: what takes `loop.time` when it is made would keep the one before.
BaseEventLoop.time = _time  # type: ignore[assignment, method-assign]


def pass_time(seconds: float) -> None:
    """Move the clock of the running event loop ahead, so that its timers fire as if so much time had passed.

    Every part of a test that runs in this loop sees the new time; other threads and processes do not.
    """
    loop = asyncio.get_running_loop()
    loop.seconds_ahead = getattr(loop, "seconds_ahead", 0.0) + seconds  # type: ignore[attr-defined]


async def settle(times: int = 20) -> None:
    """Let the loop take a few turns, in which what is already on the way in this process arrives."""
    for _ in range(times):
        await asyncio.sleep(0)

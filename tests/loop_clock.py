"""Lets time pass for the timers of an event loop without waiting for it."""

import asyncio


def pass_time(seconds: float) -> None:
    """Move the clock of the running event loop ahead, so that its timers fire as if so much time had passed.

    Every part of a test that runs in this loop sees the new time; other threads and processes do not.
    """
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


async def settle(times: int = 20) -> None:
    """Let the loop take a few turns, in which what is already on the way in this process arrives."""
    for _ in range(times):
        await asyncio.sleep(0)

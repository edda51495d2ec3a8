"""Processor time of this thread, for tests whose whole mesh runs in it.

Wall-clock time says how busy the machine is; processor time says how much work a request caused.
"""

import statistics
import time
from collections.abc import Awaitable, Callable

MOST_TIMES_USUAL = 40
"""A request that takes more processor time than so many usual ones holds up its neighbours."""


async def cpu_seconds(call: Callable[[], Awaitable[object]]) -> float:
    """Return how much processor time of this thread a call took."""
    before = time.thread_time()
    await call()
    return time.thread_time() - before


async def least_cpu_seconds(call: Callable[[], Awaitable[object]], most: float) -> float:
    """Return the least processor time of up to five such calls; stop at the first one that takes less than ``most``.

    A collection of garbage in a large test process takes longer than a request, but it does not meet every call.
    """
    seconds = await cpu_seconds(call)
    for _ in range(4):
        if seconds < most:
            break
        seconds = min(seconds, await cpu_seconds(call))
    return seconds


async def usual_cpu_seconds(call: Callable[[], Awaitable[object]]) -> float:
    """Return the median processor time of a few such calls, the first of which is not counted."""
    measured = [await cpu_seconds(call) for _ in range(6)]
    return statistics.median(measured[1:])

"""Decides whether processor time grows faster than the input of a call, without comparing one sample with a limit."""

import time
from collections.abc import Callable

TINY = range(16, 64, 4)
"""Sizes with which exponential work is found before it takes long."""
SMALL, LARGE = 1 << 8, 1 << 13
"""Sizes to compare: linear work takes 32 times as long for the larger one, quadratic work 1,024 times."""
MOST_RATIO = 200
"""Between both, nearer to the quadratic ratio: a call has a fixed cost, and large inputs miss the caches."""
FAST_SECONDS = 0.005
"""Calls with the large input that take less are not compared: their small input is too short to be measured."""
TRIES = 5


def grows_too_fast(call: Callable[[int], object], small: int = SMALL, large: int = LARGE) -> bool:
    """Return whether ``call(size)`` takes clearly more than linear time, in each of several tries.

    ``call`` makes its input of the given size itself, at a linear cost. ``large`` is 32 times ``small``.
    """
    for size in TINY:
        if _seconds(call, size) > FAST_SECONDS and min(_seconds(call, size) for _ in range(TRIES)) > FAST_SECONDS:
            return True
    longest = _seconds(call, large)
    if longest < FAST_SECONDS:
        return False
    shortest = min(_seconds(call, small) for _ in range(TRIES))
    for _ in range(TRIES):
        if longest < FAST_SECONDS or longest < MOST_RATIO * shortest:
            return False
        longest = min(longest, _seconds(call, large))
    return True


def _seconds(call: Callable[[int], object], size: int) -> float:
    before = time.thread_time()
    call(size)
    return time.thread_time() - before

"""Chooses the threads of a process by what other programs and its CPU limit leave of the cores, and binds them."""

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tokenloom.process.control_groups import CpuGroups

from ..kernels.threads import load_sharing, set_kernel_threads, share_cores

_LOOK = 0.2
"""Seconds between looks at the counters: a look reads a file for each thread."""
# Beside two busy loops on two cores, one of OpenMP's two threads nearly always waits. The gap down to _QUIET and its
# five looks keep a machine at the edge from changing its threads each second.
_SHARED = 0.25
"""Threads that wait for a processor, on average, from which on the cores are shared."""
_QUIET = 0.1
"""Below so many, in :data:`_QUIET_LOOKS` looks one after the other, they are not shared any more."""
_QUIET_LOOKS = 5
_LATE = 0.1
"""By how many seconds a look must be due for it to be put off by a step."""
_FORGOTTEN = 0.8
"""What is left of an earlier look's waiting threads at the next one, if fewer wait there."""


class Threads(Protocol):
    """What changes the threads that compute."""

    def use(self, cores: int, free: int, shared: bool) -> None:
        """Compute with at most ``cores`` threads, which are ``shared`` with other programs or are not; ``free``: how
        many threads get a core of their own."""

    def spread(self) -> None:
        """Place the threads on different cores, which are not shared. The thread that computes steps calls it."""


@dataclass(frozen=True)
class Counters:
    """What the system has counted since this process began."""

    waited: float
    """Seconds for which threads of this process waited for a processor, together."""
    throttled: float
    """Seconds for which its CPU limit stopped it."""
    limit: float | None
    """Cores that it may use."""


class CounterReader:
    """Reads the counters of this process. What a system does not count is 0."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = CpuGroups(root)

    def __call__(self) -> Counters:
        waited = 0
        for statistics in (self._root / "proc/self/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError, ValueError):  # the thread has ended
                waited += int(statistics.read_text().split()[1])  # nanoseconds
        return Counters(waited / 1e9, self._groups.throttled_seconds(), self._groups.limit())


def cores_within(limit: float | None, threads: int, num_engines: int = 1) -> int:
    """Return how many of an engine's threads a CPU limit can keep busy that ``num_engines`` share. A thread for a small
    part of a core would end each period of the limit early, for all of them."""
    return threads if limit is None else max(1, min(threads, math.ceil(limit / num_engines - 0.25)))


class CpuWatch:
    """Looks at the counters every few steps, and chooses the threads. For the thread that computes steps only."""

    def __init__(
        self,
        threads: Threads,
        most_threads: int,
        num_engines: int = 1,
        read: Callable[[], Counters] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._threads = threads
        self._most = most_threads
        self._num_engines = num_engines
        self._read = CounterReader() if read is None else read
        self._clock = clock
        self._next = -math.inf
        self._is_put_off = True  # the first step looks
        self._looked = math.nan
        self._before: Counters | None = None
        self._waiting = 0.0
        self._quiet_looks = 0
        self._is_shared = False
        self._chosen = (most_threads, most_threads, False)

    def before_step(self) -> None:
        """Look at the counters if it is time to, and place the threads for the step."""
        if (late := self._clock() - self._next) >= 0:
            # After a pause a step computes a first token, for which a look of 0.8 ms would be a part of its time; the
            # counters of idle threads say nothing either. So the step after it looks.
            self._is_put_off = late > _LATE and not self._is_put_off
            if not self._is_put_off:
                self._look()
        # On a machine that others share, keeping off the caller's core would crowd the threads onto what is left.
        if not self._is_shared:
            self._threads.spread()

    def _look(self) -> None:
        counters, now = self._read(), self._clock()
        looked, before = self._looked, self._before
        self._looked, self._before, self._next = now, counters, now + _LOOK
        if before is not None and now > looked:
            waited = counters.waited - before.waited + counters.throttled - before.throttled
            self._judge(waited / (now - looked))
        cores = cores_within(counters.limit, self._most, self._num_engines)
        # Rounded up: a thread that waits for a fraction of its time is waited for by all that share its work.
        free = max(1, cores - math.ceil(self._waiting - _QUIET)) if self._is_shared else cores
        if (chosen := (cores, free, self._is_shared)) != self._chosen:
            self._chosen = chosen
            self._threads.use(*chosen)

    def _judge(self, waiting: float) -> None:
        # It falls slowly, because other programs come in bursts.
        self._waiting = max(waiting, self._waiting * _FORGOTTEN)
        self._quiet_looks = self._quiet_looks + 1 if waiting < _QUIET else 0
        if waiting >= _SHARED:
            self._is_shared = True
        elif self._quiet_looks >= _QUIET_LOOKS:
            self._is_shared = False


class ProcessThreads:
    """Fulfils :class:`Threads` for torch's threads and those of the kernels."""

    def __init__(self, threads: int) -> None:
        """``threads``: as many as were chosen first. Kernels always get this number, because how they cut their work
        may depend on it; how many of them compute is another setting."""
        self._threads = threads
        # Loaded now, so that no step waits until it has been built; None: it cannot be built.
        self._pool = load_sharing()

    def use(self, cores: int, free: int, shared: bool) -> None:
        set_kernel_threads(self._threads)
        share_cores(shared, cores)
        if shared and self._pool is not None:
            self._pool.keep_apart(False)
        torch.set_num_threads(free)  # they wait for each other after every operation

    def spread(self) -> None:
        # For a thread that slept, Linux may choose the core on which its caller spins: OpenMP's threads are kept off
        # the core of the calling thread.
        if self._pool is not None:
            self._pool.keep_apart(True)


def bind_to(cpus: Collection[int]) -> None:
    """Bind the calling thread, and the threads that it starts from now on, to these cores. Empty: do nothing.

    Raises ``ValueError`` if this process may not use any of them, or if the system cannot bind threads.
    """
    if not cpus:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("cpus: only Linux can bind a worker to cores; leave the option out")
    try:
        os.sched_setaffinity(0, cpus)
    except OSError:
        allowed = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
        raise ValueError(f"cpus: this process may not use core {', '.join(map(str, cpus))}, only {allowed}") from None

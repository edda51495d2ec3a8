"""How busy the engine is: one consistent view, taken by its front."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.engine_core.wire.messages import EngineCoreOutputs, SchedulerStats


@dataclass(frozen=True)
class Load:
    """As in ``EngineReport``."""

    waiting: int
    running: int
    waiting_tokens: int
    kv_usage: float
    free_kv_blocks: int
    step: int


class LoadTracker:
    """Joins what the front accepted with what the core last said: waiting is all that was accepted and does not run."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        """Set when the counts may have changed; whoever reports clears it."""
        self._waiters: list[asyncio.Future[None]] = []  # a drain, a change of role
        self._stats = SchedulerStats()
        self._step = 0
        self._is_paused = False
        self._num_live = 0
        self._num_covered = 0
        self._uncovered: deque[int] = (
            deque()
        )  # prompt tokens of requests that the statistics do not cover: all are live

    @property
    def num_live(self) -> int:
        """Accepted and not ended."""
        return self._num_live

    @property
    def is_paused(self) -> bool:
        """An operator holds the engine still."""
        return self._is_paused

    @property
    def stats(self) -> SchedulerStats:
        """The core's last word."""
        return self._stats

    @property
    def step(self) -> int:
        """Of the core's loop."""
        return self._step

    def started(self, num_blocks: int) -> None:
        """The core is up, with all its blocks free."""
        self._stats = SchedulerStats(num_free_blocks=num_blocks)

    def set_paused(self, is_paused: bool) -> None:
        """A pause began or ended."""
        self._is_paused = is_paused
        self.changed.set()

    def accepted(self) -> None:
        """A request was accepted."""
        self._num_live += 1
        self.changed.set()

    def handed_over(self, num_prompt_tokens: int) -> None:
        """An accepted request is on its way to the core."""
        self._uncovered.append(num_prompt_tokens)

    def ended(self, count: int = 1) -> None:
        """Accepted requests were answered or dropped."""
        self._num_live -= count
        self.changed.set()
        self._wake()

    def observe(self, outputs: EngineCoreOutputs) -> None:
        """A step's outputs came from the core."""
        self._step = max(self._step, outputs.step)
        while self._uncovered and self._num_covered < outputs.num_requests_added:
            self._uncovered.popleft()
            self._num_covered += 1
        if (stats := outputs.scheduler_stats) is not None:
            old, self._stats = self._stats, stats
            if (old.num_waiting, old.num_running) != (stats.num_waiting, stats.num_running):
                self.changed.set()
            self._wake()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Returns once ``holds`` does; it is asked again whenever a request ended or the core said something new."""
        while not holds():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def snapshot(self) -> Load:
        """As it is now."""
        stats = self._stats
        running = min(stats.num_running, self._num_live)
        return Load(
            waiting=self._num_live - running,
            running=running,
            waiting_tokens=stats.num_waiting_tokens + sum(self._uncovered),
            kv_usage=stats.kv_usage,
            free_kv_blocks=stats.num_free_blocks,
            step=self._step,
        )

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

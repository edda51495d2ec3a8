"""How busy the engine is, and whether it takes another request: one consistent view, taken by its front."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.engine_core.wire.messages import EngineCoreOutputs, SchedulerStats
from tokenloom.request.errors import ResourceExhausted, Unavailable
from tokenloom.v1 import engine_pb2

MAX_PICKS = 4096
"""Picks to acknowledge: those of a time without a coordinator mean nothing to the next one, the newest are kept."""


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
    """Joins what the front accepted with what the core last said: waiting is all that was accepted and does not run.

    Attributes:
        changed: Set when the counts may have changed; whoever reports clears it.
        num_live: Requests that were accepted and have not ended.
        is_paused: An operator holds the engine still.
        stats: The core's last word.
        step: Of the core's loop.
    """

    def __init__(self, max_live: int) -> None:
        """``max_live``: accepted requests at most, waiting ones included."""
        self.changed = asyncio.Event()
        self.num_live = 0
        self.is_paused = False
        self.stats = SchedulerStats()
        self.step = 0
        self._max_live = max_live
        self._refusal = ""
        self._picks: deque[engine_pb2.PickId] = deque(maxlen=MAX_PICKS)
        self._waiters: list[asyncio.Future[None]] = []  # a drain, a change of role
        self._num_covered = 0
        # Prompt tokens of requests that the statistics do not cover: all are live.
        self._uncovered: deque[int] = deque()

    def started(self, num_blocks: int) -> None:
        """The core is up, with all its blocks free."""
        self.stats = SchedulerStats(num_free_blocks=num_blocks)

    def set_paused(self, is_paused: bool) -> None:
        """A pause began or ended."""
        self.is_paused = is_paused
        self.changed.set()

    def refuse_new(self, reason: str) -> None:
        """From now on every new request is answered UNAVAILABLE with ``reason``."""
        self._refusal = reason

    def admit(self, add: engine_pb2.AddRequest) -> None:
        """Raises ``Unavailable`` or ``ResourceExhausted``. The coordinator learns in any case that its pick arrived."""
        if add.HasField("pick"):
            self._picks.append(add.pick)
            self.changed.set()
        if self._refusal:
            raise Unavailable(self._refusal)
        if self.num_live >= self._max_live:
            raise ResourceExhausted(f"the engine has {self.num_live} requests, which is all it takes")

    def accepted(self) -> None:
        """A request was accepted."""
        self.num_live += 1
        self.changed.set()

    def handed_over(self, num_prompt_tokens: int) -> None:
        """An accepted request is on its way to the core."""
        self._uncovered.append(num_prompt_tokens)

    def ended(self) -> None:
        """An accepted request was answered or dropped."""
        self.num_live -= 1
        self.changed.set()
        self._wake()

    def observe(self, outputs: EngineCoreOutputs) -> None:
        """A step's outputs came from the core."""
        self.step = max(self.step, outputs.step)
        while self._uncovered and self._num_covered < outputs.num_requests_added:
            self._uncovered.popleft()
            self._num_covered += 1
        if (stats := outputs.scheduler_stats) is not None:
            old, self.stats = self.stats, stats
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
        stats = self.stats
        running = min(stats.num_running, self.num_live)
        return Load(
            waiting=self.num_live - running,
            running=running,
            waiting_tokens=stats.num_waiting_tokens + sum(self._uncovered),
            kv_usage=stats.kv_usage,
            free_kv_blocks=stats.num_free_blocks,
            step=self.step,
        )

    def take_picks(self) -> list[engine_pb2.PickId]:
        """The coordinator's picks that arrived since the last call."""
        picks = list(self._picks)
        self._picks.clear()
        return picks

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

"""An engine that holds still: for new weights, for sleep, or because an operator wants to look at it."""

import enum
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..scheduling.scheduler import Scheduler


class PauseState(enum.IntEnum):
    """What the scheduler still plans (names and values as in vLLM V1)."""

    UNPAUSED = 0
    PAUSED_NEW = 1
    """Who has begun goes on, preempted requests too; nobody else begins."""
    PAUSED_ALL = 2
    """Nothing."""


class PauseMode(enum.StrEnum):
    """What a pause means to the requests that are there; new ones queue in every mode."""

    ABORT = "abort"
    """They end with ``FinishReason.ABORT``."""
    WAIT = "wait"
    """Who has begun finishes; the others queue."""
    KEEP = "keep"
    """Everything is frozen where it is."""


class Pausing:
    """Pauses one scheduler. Belongs to the thread that steps."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._mode: PauseMode | None = None
        self._clear_cache = False
        self._quiet: Future[None] | None = None

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    @property
    def is_settling(self) -> bool:
        """Whether somebody waits for the last who run: then :meth:`settle` is to be called after each step."""
        return self._quiet is not None

    def pause(self, mode: str, *, clear_cache: bool = False) -> "Future[None]":
        """The future is done once nobody runs: at once, but for ``wait``; it fails when the pause ends before.

        ``clear_cache`` forgets cached prefixes then; who is frozen will be computed anew. Raises ``ValueError`` for an
        unknown mode, or when paused in another.
        """
        if mode not in list(PauseMode):
            raise ValueError(f"mode {mode!r} is unknown; there are {', '.join(PauseMode)}")
        if self._mode not in (None, mode):
            raise ValueError(f"the engine is paused in mode {self._mode}; resume it first")
        if self._mode is None:
            self._begin(PauseMode(mode))
        self._clear_cache |= clear_cache
        quiet = self._quiet = self._quiet or Future()
        self.settle()
        return quiet

    def settle(self) -> None:
        """Somebody may have ended: perhaps nobody runs any more."""
        if self._quiet is None or self._scheduler.is_advancing:
            return
        if self._clear_cache:
            self._clear_cache = False
            self._scheduler.reset_prefix_cache(preempt_running=True)
        quiet, self._quiet = self._quiet, None
        quiet.set_result(None)

    def resume(self) -> None:
        """Everybody goes on. Nothing happens when not paused."""
        self._mode = None
        self._clear_cache = False
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        if self._quiet is not None:
            quiet, self._quiet = self._quiet, None
            quiet.set_exception(ValueError("the engine was resumed before everybody had finished"))

    def end_frozen(self) -> None:
        """The core is to shut down: who cannot finish for the pause ends with ``FinishReason.ABORT``."""
        if self.is_paused:
            self._scheduler.abort_all()

    def _begin(self, mode: PauseMode) -> None:
        self._mode = mode
        keep = mode is PauseMode.KEEP
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL if keep else PauseState.PAUSED_NEW)
        if mode is PauseMode.ABORT:
            self._scheduler.abort_all()

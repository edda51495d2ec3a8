"""An engine that holds still: for new weights, for sleep, or because an operator wants to look at it."""

import enum
from concurrent.futures import Future

from ..scheduling.scheduler import Scheduler
from ..scheduling.step_planner import PauseState


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

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._mode: PauseMode | None = None
        self._clear_cache = False
        self.quiet: Future[None] | None = None
        """Done once no request runs. While it is set, :meth:`settle` must be called after each step."""

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

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
        quiet = self.quiet = self.quiet or Future()
        self.settle()
        return quiet

    def settle(self) -> None:
        """Somebody may have ended: perhaps nobody runs any more."""
        if self.quiet is None or self._scheduler.is_advancing:
            return
        if self._clear_cache:
            self._clear_cache = False
            self._scheduler.reset_prefix_cache(preempt_running=True)
        quiet, self.quiet = self.quiet, None
        quiet.set_result(None)

    def resume(self) -> None:
        """Everybody goes on. Nothing happens when not paused."""
        self._mode = None
        self._clear_cache = False
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        if self.quiet is not None:
            quiet, self.quiet = self.quiet, None
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

"""Pauses an engine: for new weights, for sleep, or for an operator to inspect it."""

import enum
from collections.abc import Callable
from concurrent.futures import Future

from ..scheduling.scheduler import Scheduler
from ..scheduling.step_planner import PauseState


class PauseMode(enum.StrEnum):
    """Says what a pause does with live requests; new ones are queued in every mode."""

    ABORT = "abort"
    """They all end with ``FinishReason.ABORT``."""
    WAIT = "wait"
    """Requests that have begun finish; the others stay queued."""
    KEEP = "keep"
    """All requests keep their state until the engine resumes."""


class Pausing:
    """Pauses and resumes one scheduler. Belongs to the thread that steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._mode: PauseMode | None = None
        self._clear_cache = False
        self.quiet: Future[None] | None = None
        """Done once no request runs. While it is set, :meth:`settle` must be called after each step."""
        self.is_needed: Callable[[], bool] = lambda: False
        """Returns whether other ranks of the data-parallel group need steps of this engine: a pause waits for them."""
        self.on_resume: Callable[[], None] = lambda: None
        """Called when the engine was resumed."""

    @property
    def is_paused(self) -> bool:
        return self._mode is not None

    def pause(self, mode: str, *, clear_cache: bool = False) -> "Future[None]":
        """Pause. The future is done once no request runs, which is at once except in mode ``wait``; it fails if the
        engine is resumed before.

        ``clear_cache`` then forgets cached prefixes; frozen requests will be computed anew. Raises ``ValueError`` for
        an unknown mode, or when paused in another mode.
        """
        if mode not in list(PauseMode):
            raise ValueError(f"mode {mode!r} is unknown; use one of {', '.join(PauseMode)}")
        if self._mode not in (None, mode):
            raise ValueError(f"the engine is paused in mode {self._mode}; resume it first")
        if self._mode is None:
            self._begin(PauseMode(mode))
        self._clear_cache |= clear_cache
        quiet = self.quiet = self.quiet or Future()
        self.settle()
        return quiet

    def settle(self) -> None:
        """Complete the pause if no request runs any more."""
        if self.quiet is None or self._scheduler.is_advancing or self.is_needed():
            return
        if self._clear_cache:
            self._clear_cache = False
            self._scheduler.reset_prefix_cache(preempt_running=True)
        quiet, self.quiet = self.quiet, None
        quiet.set_result(None)

    def resume(self) -> None:
        """Let all requests continue; do nothing if not paused."""
        self._mode = None
        self._clear_cache = False
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        if self.quiet is not None:
            quiet, self.quiet = self.quiet, None
            quiet.set_exception(ValueError("the engine was resumed before all requests had finished"))
        self.on_resume()

    def end_frozen(self) -> None:
        """End all requests with ``FinishReason.ABORT`` if the engine is paused, or has lost its weights, before it
        shuts down."""
        # The operator who paused the engine did not want it to compute, so a drain does not resume it: output
        # processors continue the requests on another engine.
        if self._scheduler.pause_state is not PauseState.UNPAUSED:
            self._scheduler.abort_all()

    def _begin(self, mode: PauseMode) -> None:
        self._mode = mode
        keep = mode is PauseMode.KEEP
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL if keep else PauseState.PAUSED_NEW)
        if mode is PauseMode.ABORT:
            self._scheduler.abort_all()

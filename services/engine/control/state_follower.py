"""Brings the engine into the state that operators want of it, and says how far it is."""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import NoReturn, Protocol

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import engine_pb2
from tokenloom.v1.coordinator_pb2 import DesiredState, EngineSetting, StateProgress

log = logging.getLogger(__name__)

FIRST_RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.2, 2.0
"""Between two attempts to reach a state: doubled each time."""
FALL_BACK = "not_in_state"
NO_CHANGE = 1
"""The revision of a coordinator that no operator has asked for a state. What was asked of an engine while one of an
older release served the mesh stands."""


class Administered(Protocol):
    """What an engine does for an operator. Each method raises what the operator has to know, and may be repeated."""

    async def inherit(self, setting: EngineSetting) -> bool:
        """Take the role and weights of the process before. Returns whether it has taken weights."""

    async def load_weights(self, path: str) -> None:
        """Have the weights of the checkpoint in this directory."""

    def starts_with(self, weights: Collection[bytes]) -> bool:
        """Return whether the engine's options name weights of one of these fingerprints."""

    def is_paused(self) -> bool:
        """Return whether it is paused, or asleep."""

    async def idle(self) -> None:
        """Wait until no request is there, and no other engine reads KV."""

    async def pause(self, mode: engine_pb2.PauseMode, *, clear_cache: bool) -> None:
        """Be paused."""

    async def sleep(self, level: int, mode: engine_pb2.PauseMode) -> None:
        """Sleep at a level, or stay asleep."""

    async def is_sleeping(self) -> bool:
        """Return whether any part sleeps."""

    async def wake(self, tags: "list[engine_pb2.WakeTag]") -> None:
        """Wake these parts; all if empty."""

    async def run_requests(self) -> None:
        """Be awake, and not paused."""


class StateFollower:
    """Follows one state after the other. One that cannot be reached is tried again until the next one comes.

    Another call of an operator on this engine alone stands until the next state.
    """

    def __init__(
        self,
        engine: Administered,
        show: Callable[[DesiredState, StateProgress], None],
        in_state: Callable[[], None],
        fall_backs: FallBacks,
    ) -> None:
        """``show`` reports the latest state and how far the engine is with it. ``in_state`` is called whenever the
        engine is in the state that is wanted. ``fall_backs``: those of the engine."""
        self._engine = engine
        self._show = show
        self._in_state = in_state
        self._fall_backs = fall_backs
        self._wanted = DesiredState()
        self._progress = StateProgress()
        self._weights_version = 0  # the one that was loaded, or needed not be
        self._changed = asyncio.Event()

    def take(self, wanted: DesiredState) -> None:
        """Follow this state from now on, unless it is an earlier one. Revision 0: the coordinator, of an older release,
        wants none."""
        if wanted.revision > self._wanted.revision:
            if self._progress.reached != self._wanted.revision and not wanted.engines:
                # The coordinator takes a process that has joined again for one that has its role and its weights.
                wanted.engines.extend(self._wanted.engines)
            self._wanted = wanted
            self._show(wanted, self._progress)
            self._changed.set()
        elif self._progress.reached == self._wanted.revision:
            self._in_state()

    async def run(self) -> NoReturn:
        """Follow the states until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._progress.reached != self._wanted.revision:
                # The next state ends the attempt: a pause that waits for a long request does not keep a resume waiting.
                await first_of(self._follow(self._wanted), self._changed.wait())

    async def _follow(self, wanted: DesiredState) -> None:
        """Return when the state is reached."""
        seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                await self._reach(wanted)
            except Exception as error:  # of any kind: the engine gets no requests until it has reached the state
                self._failed(wanted.revision, of_exception(error).message)
            else:
                self._reached(wanted.revision)
                return
            await asyncio.sleep(seconds)
            seconds = min(2 * seconds, LONGEST_RETRY_SECONDS)

    async def _reach(self, wanted: DesiredState) -> None:
        engine = self._engine
        keeps_weights = engine_pb2.WAKE_TAG_WEIGHTS in wanted.awake
        for setting in wanted.engines:
            keeps_weights = await engine.inherit(setting) or keeps_weights
        if wanted.weights_version > self._weights_version:
            await self._load(wanted)
        if wanted.HasField("sleep_level"):
            # An engine that sleeps with a part awake is not put to sleep again: at level 2 it would lose the weights
            # that were loaded meanwhile. One that was restarted keeps them, since nothing loads them again.
            if not (wanted.awake and await engine.is_sleeping()):
                level = min(wanted.sleep_level, 1) if keeps_weights else wanted.sleep_level
                await engine.sleep(level, wanted.pause_mode)
            if wanted.awake:
                await engine.wake(list(wanted.awake))
        elif wanted.pause_mode:
            await engine.pause(wanted.pause_mode, clear_cache=wanted.clear_cache)
        elif wanted.revision > NO_CHANGE:
            await engine.run_requests()

    async def _load(self, wanted: DesiredState) -> None:
        """Have the weights of all engines, unless this one was started with others since."""
        if self._engine.starts_with(wanted.replaced_weights):
            mode = wanted.weights_mode or engine_pb2.PAUSE_MODE_WAIT
            if mode == engine_pb2.PAUSE_MODE_WAIT and not (wanted.pause_mode or self._engine.is_paused()):
                # Requests end with the weights that they began with, those that another engine hands over here too.
                await self._engine.idle()
            if not self._engine.is_paused():
                await self._engine.pause(wanted.pause_mode or mode, clear_cache=False)
            await self._engine.load_weights(wanted.weights_path)
        self._weights_version = wanted.weights_version

    def _reached(self, revision: int) -> None:
        self._progress = StateProgress(reached=revision)
        self._fall_backs.end(FALL_BACK)
        self._show(self._wanted, self._progress)
        self._in_state()

    def _failed(self, revision: int, cause: str) -> None:
        if self._progress.cause != cause:
            log.warning("not in the state that is wanted, and trying again: %s", cause)
        self._progress = StateProgress(reached=self._progress.reached, failed=revision, cause=cause)
        self._fall_backs.begin(FALL_BACK, cause)
        self._show(self._wanted, self._progress)

"""Pauses and resumes the engine, and keeps its state for the coordinator and for peers that watch its step."""

from tokenloom.engine_core.control.pausing import PauseMode
from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.v1 import engine_pb2

from ..core.core_link import CoreLink
from ..load import LoadTracker

MODES = {
    engine_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    engine_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    engine_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}


class Pause:
    """Pauses and resumes the core. No other code calls the core's ``pause``, so the mesh always knows the state."""

    def __init__(self, core: CoreLink, load: LoadTracker) -> None:
        self._core = core
        self._load = load
        self._mode = engine_pb2.PAUSE_MODE_UNSPECIFIED
        self._is_leaving = False

    @property
    def mode(self) -> engine_pb2.PauseMode:
        """The mode of the pause; unspecified if the engine is not paused."""
        return self._mode

    async def begin(self, mode: engine_pb2.PauseMode, *, clear_cache: bool = False) -> None:
        """Pause, and return when no request runs any more. If cancelled before that, the engine stays paused.

        Raises ``InvalidArgument`` for an unknown mode, ``FailedPrecondition`` if the engine is paused in another mode,
        drains, or was resumed meanwhile, ``Unavailable`` if the core is dead.
        """
        if mode not in MODES:
            raise InvalidArgument("mode must be ABORT, WAIT or KEEP", "mode")
        if self._is_leaving:
            raise FailedPrecondition("the engine is draining")
        if self._mode not in (engine_pb2.PAUSE_MODE_UNSPECIFIED, mode):
            raise FailedPrecondition(f"the engine is paused in mode {MODES[self._mode]}; resume it first")
        self._set(mode)
        await self._core.call("pause", MODES[mode].value, clear_cache)

    async def end(self) -> None:
        """Resume, if the engine is paused. Raises ``Unavailable`` if the core is dead."""
        await self._core.call("resume")
        self._set(engine_pb2.PAUSE_MODE_UNSPECIFIED)

    def leave(self) -> bool:
        """Allow no new pause, because the engine drains. Return whether it is paused: then live requests never end."""
        self._is_leaving = True
        return self._mode != engine_pb2.PAUSE_MODE_UNSPECIFIED

    def _set(self, mode: engine_pb2.PauseMode) -> None:
        self._mode = mode
        self._load.set_paused(mode != engine_pb2.PAUSE_MODE_UNSPECIFIED)

"""Pauses and resumes the engine, and keeps its state for the coordinator and for peers that watch its step."""

from collections.abc import Sequence

from tokenloom.engine_core.control.pausing import PauseMode
from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.services.runtime.tasks import completed
from tokenloom.v1 import engine_pb2

from ..core.core_link import CoreLink
from ..records.load import LoadTracker

MODES = {
    engine_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    engine_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    engine_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}


class Pause:
    """Pauses and resumes the core. No other code calls the core's ``pause``, so the mesh always knows the state.

    Calls may overlap, because each waits for the core. The core makes them in the order in which they are sent, so a
    call that ends a pause changes nothing here if a pause has begun since it was sent.
    """

    def __init__(self, core: CoreLink, load: LoadTracker) -> None:
        self._core = core
        self._load = load
        self.mode = engine_pb2.PAUSE_MODE_UNSPECIFIED
        """The mode of the pause; unspecified if the engine is not paused."""
        self._is_leaving = False
        self._num_begun = 0

    async def begin(self, mode: engine_pb2.PauseMode, *, clear_cache: bool = False) -> int:
        """Pause, and return when no request runs any more. If cancelled before that, the engine stays paused.

        Returns a number for :meth:`end`, which then ends this pause only.

        Raises ``InvalidArgument`` for an unknown mode, ``FailedPrecondition`` if the engine is paused in another mode,
        drains, or was resumed meanwhile, ``Unavailable`` if the core is dead.
        """
        begun = self.note_begin(mode)
        await self._core.call("pause", MODES[mode].value, clear_cache)
        return begun

    def note_begin(self, mode: engine_pb2.PauseMode) -> int:
        """Note that a call follows that pauses the core. Returns and raises as :meth:`begin`."""
        if mode not in MODES:
            raise InvalidArgument("mode must be ABORT, WAIT or KEEP", "mode")
        if self._is_leaving:
            raise FailedPrecondition("the engine is draining")
        if self.mode not in (engine_pb2.PAUSE_MODE_UNSPECIFIED, mode):
            raise FailedPrecondition(f"the engine is paused in mode {MODES[self.mode]}; resume it first")
        self._set(mode)
        self._num_begun += 1
        return self._num_begun

    async def end(self, begun: int | None = None) -> None:
        """Resume, if the engine is paused. ``begun``: only if no pause has begun after this one; None: in any case.

        Raises ``FailedPrecondition`` while the engine sleeps, ``Unavailable`` if the core is dead.
        """
        await completed(self._resume(begun))

    async def wake(self, tags: Sequence[str] | None) -> None:
        """Wake these parts of the core, all if None. Its pause ends with the last one. Raises as :meth:`end`."""
        await completed(self._wake(tags))

    def leave(self) -> bool:
        """Allow no new pause, because the engine drains. Return whether it is paused: then live requests never end."""
        self._is_leaving = True
        return self.mode != engine_pb2.PAUSE_MODE_UNSPECIFIED

    # Both run to their end although the operator may leave: what the core has made must be noted here.

    async def _resume(self, begun: int | None) -> None:
        latest = self._num_begun
        if begun in (None, latest):
            await self._core.call("resume")
            self._note_end(latest)

    async def _wake(self, tags: Sequence[str] | None) -> None:
        latest = self._num_begun
        if await self._core.call("wake_up", tags):
            self._note_end(latest)

    def _note_end(self, latest: int) -> None:
        """Note that the core was resumed by a call that was sent after the pause number ``latest``."""
        # A pause may begin while the core answers. Noting the end would then show a paused engine as serving.
        if latest == self._num_begun:
            self._set(engine_pb2.PAUSE_MODE_UNSPECIFIED)

    def _set(self, mode: engine_pb2.PauseMode) -> None:
        self.mode = mode
        self._load.set_paused(mode != engine_pb2.PAUSE_MODE_UNSPECIFIED)

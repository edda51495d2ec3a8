"""The engine asleep: paused for the mesh, its memory given back by the core."""

from collections.abc import Sequence

from tokenloom.engine_core.control.sleeping import LEVELS
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import engine_pb2

from ..running_engine import RunningEngine
from .pause import MODES

_TAGS = {engine_pb2.WAKE_TAG_WEIGHTS: "weights", engine_pb2.WAKE_TAG_KV_CACHE: "kv_cache"}


class Sleep:
    """The one way to send the core of this engine to sleep: nobody else does, or the mesh would not know."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine

    async def begin(self, level: int, mode: engine_pb2.PauseMode) -> None:
        """Returns when memory is given back; leases end before, of themselves when ``mode`` is to wait. Cancelled
        before that, the engine stays paused.

        Raises ``InvalidArgument`` for an unknown level or mode, ``FailedPrecondition`` when asleep in another level, or
        as :meth:`Pause.begin`, ``Unavailable`` when the core is dead.
        """
        if level not in LEVELS:
            raise InvalidArgument(f"level must be 0, 1 or 2, not {level}", "level")
        await self._engine.pause.begin(mode, clear_cache=level > 0)
        if level and mode == engine_pb2.PAUSE_MODE_WAIT:
            await self._engine.leases_ended()
        await self._engine.core.call("sleep", level, MODES[mode].value)

    async def end(self, tags: Sequence[engine_pb2.WakeTag]) -> None:
        """Wakes what ``tags`` name, all if there are none; with the last part, requests go on.

        Raises ``InvalidArgument`` for an unknown tag, ``FailedPrecondition`` when the weights cannot be the same again.
        """
        if any(tag not in _TAGS for tag in tags):
            raise InvalidArgument("tags may be WEIGHTS and KV_CACHE", "tags")
        if not await self.is_sleeping():
            return
        await self._engine.core.call("wake_up", [_TAGS[tag] for tag in tags] or None)
        if not await self.is_sleeping():
            await self._engine.pause.end()

    async def is_sleeping(self) -> bool:
        """From the core's :meth:`begin` on until everything is awake."""
        return bool(await self._engine.core.call("is_sleeping"))

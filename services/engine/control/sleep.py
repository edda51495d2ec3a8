"""Puts the engine to sleep and wakes it: the mesh sees a pause, and the core releases its memory."""

import logging
from collections.abc import Sequence

import msgspec

from tokenloom.engine_core.control.sleeping import LEVELS
from tokenloom.engine_core.data.model_info import FreedMemory
from tokenloom.request.errors import InvalidArgument
from tokenloom.v1 import engine_pb2

from ..running_engine import RunningEngine
from .pause import MODES

log = logging.getLogger(__name__)

_TAGS = {engine_pb2.WAKE_TAG_WEIGHTS: "weights", engine_pb2.WAKE_TAG_KV_CACHE: "kv_cache"}


class Sleep:
    """Puts the core to sleep. No other code calls the core's ``sleep``, so the mesh always knows the state."""

    def __init__(self, engine: RunningEngine) -> None:
        self._engine = engine

    async def begin(self, level: int, mode: engine_pb2.PauseMode) -> FreedMemory:
        """Pause, release memory, and return how much that was. Leases end first; if ``mode`` is WAIT, they end
        normally. If cancelled before that, the engine stays paused.

        Raises ``InvalidArgument`` for an unknown level or mode, ``FailedPrecondition`` if the engine sleeps at another
        level, if a worker fails (the engine then sleeps all the same, and may sleep again or wake up), or as
        :meth:`Pause.begin`, ``Unavailable`` if the core is dead.
        """
        if level not in LEVELS:
            raise InvalidArgument(f"level must be 0, 1 or 2, not {level}", "level")
        await self._engine.pause.begin(mode, clear_cache=level > 0)
        if level and mode == engine_pb2.PAUSE_MODE_WAIT:
            # Another engine may be copying leased blocks; released memory would be read by it.
            await self._engine.leases_ended()
        self._engine.pause.note_begin(mode)  # the engine may have been resumed meanwhile
        freed = msgspec.convert(await self._engine.core.call("sleep", level, MODES[mode].value), FreedMemory)
        log.info(
            "asleep at level %d: released %d MiB of weights and %d MiB of KV; host memory keeps %d MiB",
            *(level, freed.weights >> 20, freed.kv_cache >> 20, freed.kept_on_host >> 20),
        )
        return freed

    async def end(self, tags: Sequence[engine_pb2.WakeTag]) -> None:
        """Wake the parts that ``tags`` name, all if empty. Requests resume when the last part is awake.

        Raises ``InvalidArgument`` for an unknown tag, ``FailedPrecondition`` if the weights cannot be restored.
        """
        if any(tag not in _TAGS for tag in tags):
            raise InvalidArgument("tags must be WEIGHTS or KV_CACHE", "tags")
        if not await self.is_sleeping():
            return
        await self._engine.pause.wake([_TAGS[tag] for tag in tags] or None)

    async def is_sleeping(self) -> bool:
        """Return whether any part of the core is asleep."""
        return bool(await self._engine.core.call("is_sleeping"))

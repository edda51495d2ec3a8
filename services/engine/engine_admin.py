"""Serves ``EngineAdmin``: operations on one engine, among them sleeping.

Asleep, the mesh sees a pause, and the core has released its memory.
"""

import logging
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import msgspec

from tokenloom.engine_core.control.sleeping import LEVELS
from tokenloom.engine_core.data.model_info import FreedMemory
from tokenloom.request.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    TokenloomError,
)
from tokenloom.request.prefix_schedule import specimen_hash
from tokenloom.v1 import coordinator_pb2, engine_pb2, engine_pb2_grpc, types_pb2

from .control.loras import to_adapter, to_state
from .control.pause import MODES
from .control.role import NAMES, Role
from .kv.kv_front import counted
from .running_engine import RunningEngine
from .weights import Weights, drain

log = logging.getLogger(__name__)
_NO_OWNER = "the engine serves no KV to others"

MAX_PREFIX_SECONDS = 60.0
"""As long as changes of the prefix cache are gathered at most before a reader gets them."""


class Administration:
    """Does what operators want of one engine, for a coordinator or a gateway. Every method may be repeated.

    Attributes:
        role: Which legs the engine takes.
        sleeping: Puts the core to sleep.
        weights: Replaces the weights.
    """

    def __init__(self, engine: RunningEngine, role: types_pb2.EngineRole) -> None:
        """``role``: the one that the engine starts with."""
        self._engine = engine
        self.role = Role(role, engine.publish_role, engine.leases_ended)
        self.sleeping = Sleep(engine)
        self.weights = Weights(engine)
        self._has_role = self._has_weights = False  # set in this process by an operator

    async def inherit(self, setting: coordinator_pb2.EngineSetting) -> bool:
        """Take role and weights that the process before was set to, unless an operator has set this one meanwhile.
        Returns whether weights were taken. Raises as :meth:`set_role` and :meth:`load_weights`."""
        if setting.role and not self._has_role:
            await self._take_role(setting.role)
            await self._hand_over(setting.role)
        if takes_weights := bool(setting.weights_path) and not self._has_weights:
            await self.load_weights(setting.weights_path)
        return takes_weights

    async def set_role(self, role: types_pb2.EngineRole) -> None:
        """Raises ``InvalidArgument``, and ``FailedPrecondition`` if the engine does not transfer the KV that the role
        needs."""
        # Before it waits for leases: the state that the coordinator sends meanwhile may hold an older role.
        had, self._has_role = self._has_role, True
        try:
            await self._take_role(role)
        except BaseException:
            self._has_role = had
            raise
        await self._hand_over(role)

    async def reload_weights(self, path: str, mode: engine_pb2.PauseMode) -> None:
        """Raises as :meth:`Weights.reload`."""
        had, self._has_weights = self._has_weights, True
        try:
            await self.weights.reload(path, mode)
        except BaseException:
            self._has_weights = had
            raise

    async def _take_role(self, role: types_pb2.EngineRole) -> None:
        # An engine that reported itself as an encoder lost its place in the mesh.
        if role not in NAMES:
            raise InvalidArgument("role must be BOTH, PREFILL or DECODE", "role")
        if self._engine.kv is None:
            raise FailedPrecondition("the engine transfers no KV; start it with --kv-transports", field="role")
        # The coordinator refuses reports of an engine whose KV no other one can read, which would then leave the mesh.
        if role == types_pb2.ENGINE_ROLE_PREFILL and self._engine.kv.owner is None:
            raise FailedPrecondition(f"{_NO_OWNER}; start it with --kv-listen", field="role")
        await self.role.change(role)

    async def _hand_over(self, role: types_pb2.EngineRole) -> None:
        """Move what the engine decodes away if it is to prefill: it would delay prompts until it ends. New requests go
        elsewhere by now."""
        if role == types_pb2.ENGINE_ROLE_PREFILL and self._engine.kv is not None:
            await self._engine.kv.moves.move("", "", "role")

    async def load_weights(self, path: str) -> None:
        """Load the weights of a checkpoint unless the engine has them. Raises as :meth:`Weights.reload`."""
        if not await self.weights.are(path):
            await self.weights.reload(path)

    def starts_with(self, weights: Collection[bytes]) -> bool:
        return self._engine.identity.facts.start_weights in weights

    async def idle(self) -> None:
        await self._engine.streams.idle()
        await self._engine.leases_ended()

    def is_paused(self) -> bool:
        return self._engine.pause.mode != engine_pb2.PAUSE_MODE_UNSPECIFIED

    async def pause(self, mode: engine_pb2.PauseMode, *, clear_cache: bool) -> None:
        """Raises as :meth:`Pause.begin`."""
        await self._engine.pause.begin(mode, clear_cache=clear_cache)

    async def sleep(self, level: int, mode: engine_pb2.PauseMode) -> None:
        """Raises as :meth:`Sleep.begin`."""
        await self.sleeping.begin(level, mode)

    async def is_sleeping(self) -> bool:
        return await self.sleeping.is_sleeping()

    async def wake(self, tags: Sequence[engine_pb2.WakeTag]) -> None:
        """Raises as :meth:`Sleep.end`."""
        await self.sleeping.end(tags)

    async def run_requests(self) -> None:
        """Raises as :meth:`Sleep.end` and :meth:`Pause.end`."""
        if not self.is_paused():
            return  # nor asleep: whatever puts the core to sleep pauses it first
        await self.sleeping.end([])
        await self._engine.pause.end()


class EngineAdminServicer(engine_pb2_grpc.EngineAdminServicer):
    """Passes each call to the part that performs it. Errors are raised; the servicer edge turns them into statuses."""

    def __init__(self, engine: RunningEngine, administration: Administration) -> None:
        self._engine = engine
        self._core = engine.core
        self._pause = engine.pause
        self._administration = administration
        self._sleep = administration.sleeping
        self._loras = engine.loras

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Any
    ) -> engine_pb2.GetEngineInfoResponse:
        load = self._engine.load.snapshot()
        return engine_pb2.GetEngineInfoResponse(
            fingerprint=self._engine.identity.fingerprint,
            num_kv_blocks=self._core.ready.num_kv_blocks,
            max_model_len=self._core.ready.max_model_len,
            waiting=load.waiting,
            running=load.running,
            pause_mode=self._pause.mode,
        )

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: Any
    ) -> engine_pb2.ResetPrefixCacheResponse:
        if not await self._core.call("reset_prefix_cache", request.preempt_running):
            raise FailedPrecondition(
                "requests are running; wait until none is, or set preempt_running to reset the cache now"
            )
        return engine_pb2.ResetPrefixCacheResponse()

    async def ResetEncoderCache(
        self, request: engine_pb2.ResetEncoderCacheRequest, context: Any
    ) -> engine_pb2.ResetEncoderCacheResponse:
        await self._core.call("reset_encoder_cache")
        return engine_pb2.ResetEncoderCacheResponse()

    async def Pause(self, request: engine_pb2.PauseRequest, context: Any) -> engine_pb2.PauseResponse:
        await self._pause.begin(request.mode, clear_cache=request.clear_cache)
        return engine_pb2.PauseResponse()

    async def Resume(self, request: engine_pb2.ResumeRequest, context: Any) -> engine_pb2.ResumeResponse:
        await self._pause.end()
        return engine_pb2.ResumeResponse()

    async def WatchKVEvents(  # type: ignore[override]  # a coroutine that writes to the context, not a generator
        self, request: engine_pb2.WatchKVEventsRequest, context: Any
    ) -> None:
        if (feed := self._core.kv_events) is None:
            raise FailedPrecondition("KV events are off; start the engine with --kv-events")
        sequence = request.from_sequence if request.HasField("from_sequence") else None
        if request.HasField("prefix_interval"):
            prints = self._engine.identity.fingerprint
            interval = request.prefix_interval.ToNanoseconds() / 1e9
            if not 0 <= interval <= MAX_PREFIX_SECONDS:
                raise InvalidArgument(f"prefix_interval must be 0 to {MAX_PREFIX_SECONDS:g} seconds", "prefix_interval")
            specimen = specimen_hash(prints.block_size, prints.block_hash_seed)
            # The coordinator gets changes and not events: of an interval in which a block was stored and evicted it
            # gets nothing, otherwise 8 bytes for each block that prompts name.
            batches = feed.follow_prefixes(sequence, interval, specimen)
        else:
            batches = feed.follow(sequence)
        async for batch in batches:
            await context.write(batch)

    async def SetRole(self, request: engine_pb2.SetRoleRequest, context: Any) -> engine_pb2.SetRoleResponse:
        await self._administration.set_role(request.role)
        return engine_pb2.SetRoleResponse()

    async def Sleep(self, request: engine_pb2.SleepRequest, context: Any) -> engine_pb2.SleepResponse:
        freed = await self._sleep.begin(request.level, request.mode)
        return engine_pb2.SleepResponse(
            weights_bytes=freed.weights, kv_cache_bytes=freed.kv_cache, kept_on_host_bytes=freed.kept_on_host
        )

    async def WakeUp(self, request: engine_pb2.WakeUpRequest, context: Any) -> engine_pb2.WakeUpResponse:
        await self._sleep.end(request.tags)
        return engine_pb2.WakeUpResponse()

    async def IsSleeping(self, request: engine_pb2.IsSleepingRequest, context: Any) -> engine_pb2.IsSleepingResponse:
        return engine_pb2.IsSleepingResponse(sleeping=await self._sleep.is_sleeping())

    async def ReloadWeights(
        self, request: engine_pb2.ReloadWeightsRequest, context: Any
    ) -> engine_pb2.ReloadWeightsResponse:
        await self._administration.reload_weights(request.path, request.mode)
        return engine_pb2.ReloadWeightsResponse(fingerprint=self._engine.identity.fingerprint)

    async def StageWeights(
        self, request_iterator: AsyncIterator[engine_pb2.StageWeightsRequest], context: Any
    ) -> engine_pb2.StageWeightsResponse:
        try:
            path, weights = await self._administration.weights.stage(request_iterator)
        except DeadlineExceeded:
            raise
        except TokenloomError:
            await drain(request_iterator)
            raise
        return engine_pb2.StageWeightsResponse(path=str(path), weights=weights)

    async def CheckWeights(
        self, request: engine_pb2.ReloadWeightsRequest, context: Any
    ) -> engine_pb2.CheckWeightsResponse:
        await self._administration.weights.check(request.path)
        return engine_pb2.CheckWeightsResponse()

    async def LoadLora(self, request: engine_pb2.LoadLoraRequest, context: Any) -> engine_pb2.LoadLoraResponse:
        state = await self._loras.load(request.name, request.path, request.digest, in_place=request.in_place)
        return engine_pb2.LoadLoraResponse(adapter=to_adapter(state))

    async def UnloadLora(self, request: engine_pb2.UnloadLoraRequest, context: Any) -> engine_pb2.UnloadLoraResponse:
        await self._loras.unload(request.name)
        return engine_pb2.UnloadLoraResponse()

    async def ListLoras(self, request: engine_pb2.ListLorasRequest, context: Any) -> engine_pb2.ListLorasResponse:
        return engine_pb2.ListLorasResponse(adapters=map(to_state, await self._loras.list()))

    async def PinLora(self, request: engine_pb2.PinLoraRequest, context: Any) -> engine_pb2.PinLoraResponse:
        await self._loras.pin(request.name, pinned=request.pinned)
        return engine_pb2.PinLoraResponse()

    async def MoveRequests(
        self, request: engine_pb2.MoveRequestsRequest, context: Any
    ) -> engine_pb2.MoveRequestsResponse:
        if (kv := self._engine.kv) is None or kv.owner is None:
            raise FailedPrecondition(f"{_NO_OWNER}; start it with --kv-transports")
        if request.target == kv.owner.engine_id:
            # A gateway asks all engines for a request. What has been lent would come back with another reason.
            return counted([(attempt, "it runs here already") for attempt in self._core.movable(request.request_id)])
        return counted(await kv.moves.move(request.request_id, request.target, "operator"))

    async def Reconfigure(self, request: engine_pb2.ReconfigureRequest, context: Any) -> engine_pb2.ReconfigureResponse:
        await self._engine.resize_group(request.data_parallel_size)
        return engine_pb2.ReconfigureResponse()

    async def StartProfile(
        self, request: engine_pb2.StartProfileRequest, context: Any
    ) -> engine_pb2.StartProfileResponse:
        await self._core.call("profile", True, request.profile_prefix)
        return engine_pb2.StartProfileResponse()

    async def StopProfile(self, request: engine_pb2.StopProfileRequest, context: Any) -> engine_pb2.StopProfileResponse:
        await self._core.call("profile", False)
        return engine_pb2.StopProfileResponse()


_TAGS = {
    engine_pb2.WAKE_TAG_WEIGHTS: "weights",
    engine_pb2.WAKE_TAG_KV_CACHE: "kv_cache",
    engine_pb2.WAKE_TAG_SCHEDULING: "scheduling",
}


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
            raise InvalidArgument("tags must be WEIGHTS, KV_CACHE or SCHEDULING", "tags")
        if not await self.is_sleeping():
            return
        await self._engine.pause.wake([_TAGS[tag] for tag in tags] or None)

    async def is_sleeping(self) -> bool:
        """Return whether any part of the core is asleep."""
        return bool(await self._engine.core.call("is_sleeping"))

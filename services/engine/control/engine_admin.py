"""Serves ``EngineAdmin``: operations on one engine."""

from typing import Any

from tokenloom.request.errors import FailedPrecondition, InvalidArgument
from tokenloom.request.prompt_block_hash import specimen_hash
from tokenloom.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from ..running_engine import RunningEngine
from .loras import to_adapter, to_state
from .role import Role
from .sleep import Sleep
from .weights import Weights

MAX_PREFIX_SECONDS = 60.0
"""As long as changes of the prefix cache are gathered at most before a reader gets them."""


class EngineAdminServicer(engine_pb2_grpc.EngineAdminServicer):
    """Passes each call to the part that performs it. Errors are raised; the servicer edge turns them into statuses."""

    def __init__(self, engine: RunningEngine, role: types_pb2.EngineRole) -> None:
        """``role``: the one that the engine starts with."""
        self._engine = engine
        self._core = engine.core
        self._pause = engine.pause
        self._role = Role(role, engine.publish_role, engine.leases_ended)
        self._sleep = Sleep(engine)
        self._weights = Weights(engine)
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
        if request.role not in types_pb2.EngineRole.values() or not request.role:
            raise InvalidArgument("role must be BOTH, PREFILL or DECODE", "role")
        if self._engine.kv is None:
            raise FailedPrecondition("the engine transfers no KV; start it with --kv-transports", field="role")
        await self._role.change(request.role)
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
        await self._weights.reload(request.path)
        return engine_pb2.ReloadWeightsResponse(fingerprint=self._engine.identity.fingerprint)

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

    async def Reconfigure(self, request: engine_pb2.ReconfigureRequest, context: Any) -> engine_pb2.ReconfigureResponse:
        await self._engine.resize_group(request.data_parallel_size)
        return engine_pb2.ReconfigureResponse()

    async def StartProfile(
        self, request: engine_pb2.StartProfileRequest, context: Any
    ) -> engine_pb2.StartProfileResponse:
        await self._core.call("profile", True)
        return engine_pb2.StartProfileResponse()

    async def StopProfile(self, request: engine_pb2.StopProfileRequest, context: Any) -> engine_pb2.StopProfileResponse:
        await self._core.call("profile", False)
        return engine_pb2.StopProfileResponse()

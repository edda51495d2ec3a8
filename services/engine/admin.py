"""The ``EngineAdmin`` service: what an operator asks of one engine."""

from typing import Any, NoReturn

from tokenloom.engine_core.async_client import AsyncClient
from tokenloom.engine_core.errors import EngineDeadError
from tokenloom.engine_core.messages import CoreReady
from tokenloom.v1 import engine_pb2, engine_pb2_grpc, types_pb2

from ..runtime.errors import FailedPrecondition, Unavailable, Unimplemented
from .load import LoadTracker


class EngineAdminServicer(engine_pb2_grpc.EngineAdminServicer):
    """Errors are raised; the edge makes statuses of them."""

    def __init__(
        self, client: AsyncClient, ready: CoreReady, fingerprint: types_pb2.Fingerprint, load: LoadTracker
    ) -> None:
        self._client = client
        self._ready = ready
        self._fingerprint = fingerprint
        self._load = load

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Any
    ) -> engine_pb2.GetEngineInfoResponse:
        load = self._load.snapshot()
        return engine_pb2.GetEngineInfoResponse(
            fingerprint=self._fingerprint,
            num_kv_blocks=self._ready.num_kv_blocks,
            max_model_len=self._ready.max_model_len,
            waiting=load.waiting,
            running=load.running,
        )

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: Any
    ) -> engine_pb2.ResetPrefixCacheResponse:
        if request.preempt_running:
            raise Unimplemented("preempt_running is not supported yet", field="preempt_running")
        try:
            done = await self._client.call_utility("reset_prefix_cache")
        except EngineDeadError:
            raise Unavailable("the engine failed") from None
        if not done:
            raise FailedPrecondition("requests are running; the prefix cache can be reset when none is")
        return engine_pb2.ResetPrefixCacheResponse()

    async def Pause(self, request: engine_pb2.PauseRequest, context: Any) -> NoReturn:
        raise Unimplemented("pausing comes in a later version")

    async def Resume(self, request: engine_pb2.ResumeRequest, context: Any) -> NoReturn:
        raise Unimplemented("pausing comes in a later version")

    async def SetRole(self, request: engine_pb2.SetRoleRequest, context: Any) -> NoReturn:
        raise Unimplemented("changing the role of a running engine is not supported yet", field="role")

"""The stream of picks to the coordinator: those of one moment in one message, answered in the order in which they were
asked."""

import asyncio
import logging
from collections import deque

import grpc.aio

from tokenloom.request import errors
from tokenloom.services.runtime.host.tasks import first_of
from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import PickBatch, PickRequest, PickResponse, PickResult, PickResults

log = logging.getLogger(__name__)

_REOPEN_SECONDS = 0.2


class PickStream:
    """Reopened for as long as ``run`` runs. What waits when it ends fails."""

    def __init__(self, stub: "coordinator_pb2_grpc.CoordinatorAsyncStub") -> None:
        self._stub = stub
        self._waiting: deque[asyncio.Future[PickResponse]] = deque()  # as many as requests wait to be placed
        self._batch = PickBatch()  # bounded likewise: the writer takes it whole
        self._wake = asyncio.Event()
        self.is_open = False
        """Whether :meth:`pick` may be called: the coordinator takes picks."""

    def pick(self, request: PickRequest) -> asyncio.Future[PickResponse]:
        """As the coordinator's ``Pick``: what it answers or raises, ``Unavailable`` also when the stream ends."""
        assert self.is_open
        future: asyncio.Future[PickResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._batch.pick.append(request)
        self._wake.set()
        return future

    async def run(self) -> None:
        """Keeps the stream open, for ever."""
        while True:
            call = self._stub.PickStream()
            try:
                _check(await call.read())  # the coordinator is there
                self.is_open = True
                await first_of(self._write(call), self._read(call))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, errors.TokenloomError) as error:
                log.debug(
                    "stream of picks: %s", error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
                )
            finally:
                call.cancel()
                self._close()
            await asyncio.sleep(_REOPEN_SECONDS)

    async def _write(self, call: "grpc.aio.StreamStreamCall[PickBatch, PickResults]") -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._batch = self._batch, PickBatch()
            await call.write(batch)

    async def _read(self, call: "grpc.aio.StreamStreamCall[PickBatch, PickResults]") -> None:
        while True:
            for result in _check(await call.read()).result:
                self._settle(result)

    def _settle(self, result: PickResult) -> None:
        if not self._waiting:
            raise errors.Internal("the coordinator answered a pick that nobody asked for")
        future = self._waiting.popleft()
        if future.done():
            return  # whoever asked has given up
        if result.HasField("error"):
            _fail(future, errors.from_proto(result.error))
        else:
            future.set_result(result.response)

    def _close(self) -> None:
        self.is_open = False
        self._batch = PickBatch()
        self._wake.clear()
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                _fail(future, errors.Unavailable("the coordinator went away"))


def _fail(future: asyncio.Future[PickResponse], error: errors.TokenloomError) -> None:
    future.set_exception(error)
    future.exception()  # seen, though whoever asked may have ended before it waits


def _check(message: object) -> PickResults:
    if not isinstance(message, PickResults):
        raise errors.Unavailable("the coordinator ended the stream")
    return message

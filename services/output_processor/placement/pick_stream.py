"""Asks the coordinator for picks over one stream, several in one message; answers come in the order of the picks."""

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
    """Keeps the stream open while ``run`` runs. When the stream ends, waiting picks fail and it is opened again."""

    def __init__(self, stub: "coordinator_pb2_grpc.CoordinatorAsyncStub") -> None:
        self._stub = stub
        self._waiting: deque[asyncio.Future[PickResponse]] = deque()  # as many as requests wait to be placed
        self._batch = PickBatch()  # bounded by the same number: the writer takes it whole
        self._wake = asyncio.Event()
        self.is_open = False
        """Whether the coordinator takes picks; only then may :meth:`pick` be called."""

    def pick(self, request: PickRequest) -> asyncio.Future[PickResponse]:
        """Return a future for the coordinator's answer or error. It fails with ``Unavailable`` if the stream ends."""
        assert self.is_open
        future: asyncio.Future[PickResponse] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self._batch.pick.append(request)
        self._wake.set()
        return future

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
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
            raise errors.Internal("the coordinator sent more answers than it was asked for")
        future = self._waiting.popleft()
        if future.done():
            return  # the request ended meanwhile
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
                _fail(future, errors.Unavailable("The coordinator became unavailable; retry."))


def _fail(future: asyncio.Future[PickResponse], error: errors.TokenloomError) -> None:
    future.set_exception(error)
    future.exception()  # marks it as seen: the request may have ended, and then nothing awaits it


def _check(message: object) -> PickResults:
    if not isinstance(message, PickResults):
        raise errors.Unavailable("the coordinator ended the stream")
    return message

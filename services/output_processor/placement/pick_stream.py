"""Asks the coordinator for picks over one stream, several in one message; answers come in the order of the picks.

One message is unanswered at a time: what comes meanwhile goes with the next one (Nagle, RFC 896). A message costs the
coordinator as much as several picks, so a busy one gets fewer and larger messages, and an idle one answers at once.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable

import grpc.aio

from tokenloom.process.fall_backs import FallBacks
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.liveness import is_late
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import coordinator_pb2_grpc
from tokenloom.v1.coordinator_pb2 import PickBatch, PickRequest, PickResponse, PickResult, PickResults

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""How long the coordinator may take to answer a pick. Then it counts as away, for every request, until it answers."""
_MAX_BATCH = 256
"""Picks of one message: about half a megabyte if each names 256 blocks."""
_REOPEN_SECONDS = 0.2


class PickStream:
    """Keeps the stream open while ``run`` runs. When the stream ends, waiting picks fail and it is opened again.

    When one pick waits too long, all picks fail that wait with it: only the first request waits for a coordinator that
    does not answer. The next message from the coordinator opens the stream for picks again.

    Attributes:
        is_open: Whether the coordinator takes picks; only then may :meth:`pick` be called.
        is_away: Whether the coordinator has answered before and does not now, so that asking it only costs time.
    """

    def __init__(self, stub: "coordinator_pb2_grpc.CoordinatorAsyncStub", fall_backs: FallBacks | None = None) -> None:
        """``fall_backs``: where it is noted that the coordinator does not answer; None: nowhere."""
        self._stub = stub
        self._fall_backs = fall_backs or FallBacks()
        # The answers that are due, with the times of their picks: as many as requests wait to be placed.
        self._waiting: deque[tuple[asyncio.Future[PickResponse], float]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0
        self._has_waited_longer = False
        self._unsent: deque[PickRequest] = deque()  # the last ones of those
        self._num_unanswered = 0  # of the message that the coordinator has
        self._wake = asyncio.Event()
        self.is_open = False
        self.is_away = False

    def pick(self, request: PickRequest) -> asyncio.Future[PickResponse]:
        """Return a future for the coordinator's answer or error. It fails with ``Unavailable`` if the stream ends or
        the coordinator does not answer for :data:`ANSWER_SECONDS`."""
        # The coordinator decides alone, and each pick counts before the next. From counts that it publishes, as vLLM's
        # front ends decide, two output processors could choose the same idle engine at once.
        assert self.is_open
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PickResponse] = loop.create_future()
        self._waiting.append((future, loop.time()))
        if self._timer is None:
            self._look_after(ANSWER_SECONDS)
        self._unsent.append(request)
        self._wake.set()
        return future

    def suspend(self) -> None:
        """Take no picks until the coordinator sends a message, because it left a call unanswered; waiting picks fail.
        The message is provoked here, unless one is due."""
        if self.is_open:
            self.is_open, self.is_away = False, True
            # All picks fail together and later ones do not ask: otherwise each request waits its own second. With the
            # coordinator stopped for 10 s, one request of some 250 takes 1.02 s now.
            self._fall_backs.begin("last_snapshot", "it left a pick unanswered")
            for future, _ in self._waiting:
                _fail_unless_done(future)
            for _ in self._unsent:  # the others stay, because their answers still come in this order
                self._waiting.pop()
            self._unsent.clear()
            self._wake.set()  # an empty batch is answered too

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        while True:
            call = self._stub.PickStream()
            try:
                self._take(await call.read())  # the coordinator is there
                await first_of(self._write(call), self._read(call))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, errors.TokenloomError) as error:
                log.debug(
                    "stream of picks: %s", error.code().name if isinstance(error, grpc.aio.AioRpcError) else error
                )
            except Exception:  # of an answer that cannot be: the next stream begins anew
                log.exception("the stream of picks ended")
            except asyncio.CancelledError:
                self.is_open = False  # this process ends the stream: the coordinator does not lack
                raise
            finally:
                call.cancel()
                self._close()
            await asyncio.sleep(_REOPEN_SECONDS)

    async def _write(self, call: "grpc.aio.StreamStreamCall[PickBatch, PickResults]") -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._num_unanswered:
                batch = [self._unsent.popleft() for _ in range(min(len(self._unsent), _MAX_BATCH))]
                # One message at a time: gRPC for Python takes some 200 µs for a message and its answer, as much as
                # several picks. A unary call for each pick cost 1.4 ms of the time to the first token, the stream costs
                # 0.65.
                self._num_unanswered = len(batch)
                await call.write(PickBatch(pick=batch))

    async def _read(self, call: "grpc.aio.StreamStreamCall[PickBatch, PickResults]") -> None:
        while True:
            for result in self._take(await call.read()):
                self._settle(result)

    def _take(self, message: object) -> Iterable[PickResult]:
        """Return the results in a message of the coordinator, which takes picks from then on."""
        if not isinstance(message, PickResults):
            raise errors.Unavailable("the coordinator ended the stream")
        if self.is_away:
            self._fall_backs.end("last_snapshot")
        self.is_open, self.is_away = True, False
        return message.result

    def _look(self) -> None:
        """Suspend the stream if its oldest pick has waited too long; otherwise look again when it would have.

        A process that was starved looks once more: the answer may be here, but not read yet.
        """
        self._timer = None
        if self.is_open and self._waiting:
            _, asked_at = self._waiting[0]
            loop = asyncio.get_running_loop()
            if is_late(self._look_at) and not self._has_waited_longer:
                self._has_waited_longer = True
                self._look_after(ANSWER_SECONDS)
                return
            self._has_waited_longer = False
            if loop.time() >= asked_at + ANSWER_SECONDS:
                self.suspend()
            else:
                self._look_after(asked_at + ANSWER_SECONDS - loop.time())

    def _look_after(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._look_at = loop.time() + seconds
        self._timer = loop.call_at(self._look_at, self._look)

    def _settle(self, result: PickResult) -> None:
        if not self._num_unanswered:  # picks that wait may not have been sent yet
            raise errors.Internal("the coordinator sent more answers than it was asked for")
        future, _ = self._waiting.popleft()
        self._num_unanswered -= 1
        if not self._num_unanswered and self._unsent:
            self._wake.set()
        if future.done():
            return  # the request ended meanwhile
        if result.HasField("error"):
            _fail(future, wire_errors.from_proto(result.error))
        else:
            future.set_result(result.response)

    def _close(self) -> None:
        if self.is_open:
            self._fall_backs.begin("last_snapshot", "it ended the stream of picks")
        self.is_away = self.is_away or self.is_open
        self.is_open = False
        self._unsent.clear()
        self._num_unanswered = 0
        self._wake.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            _fail_unless_done(future)


def _fail_unless_done(future: asyncio.Future[PickResponse]) -> None:
    if not future.done():
        _fail(future, errors.Unavailable("The coordinator became unavailable; retry."))


def _fail(future: asyncio.Future[PickResponse], error: errors.TokenloomError) -> None:
    future.set_exception(error)
    future.exception()  # marks it as seen: the request may have ended, and then nothing awaits it

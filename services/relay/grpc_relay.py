"""Ends HTTP/2 of gRPC's clients in a process that outlives gateways: what HTTP/2 keeps of a connection is in the
process that made it, and is lost with it.

An answer of ``Inference.Generate`` is continued at another gateway by its positions, as our own clients do it, and
turns of other calls as :mod:`.courses` says. Calls that change nothing are made again; all others come through as they
are.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import grpc.aio
from google.protobuf.message import DecodeError

from tokenloom.client.answer_course import IDEMPOTENCY_KEY, AnswerCourse, NextCall, Retries
from tokenloom.client.async_calls import (
    CLOSE_SECONDS,
    AsyncCancellations,
    Call,
    CallError,
    details_of,
    open_channel,
    was_cut,
)
from tokenloom.client.async_client import AsyncResponses
from tokenloom.client.connection import Gateways, Metadata
from tokenloom.request import errors, wire_errors
from tokenloom.request.limits import AdmissionLimit
from tokenloom.services.runtime.host.limits import decoded
from tokenloom.services.runtime.host.servicer_edge import WATCH, Impatient, OutsideCalls, only_message
from tokenloom.services.runtime.local_streams.server import damaged_request
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

from .courses import COURSES, Course, RelayedTurns, next_of, take_room

log = logging.getLogger(__name__)

_SERVICE = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/"
_KSERVE, _VLLM = "/inference.GRPCInferenceService/", "/vllm.grpc.engine.VllmEngine/"
_TRANSCRIBE = _SERVICE + "Transcribe"
_REPEATED = frozenset(
    (
        _TRANSCRIBE,
        *(_SERVICE + name for name in ("Embed", "Classify", "Score", "Pool", "ListModels", "Cancel")),
        *(_KSERVE + name for name in ("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata")),
        *(_VLLM + name for name in ("HealthCheck", "Abort", "GetModelInfo", "GetServerInfo")),
        "/grpc.health.v1.Health/Check",
    )
)
"""Calls whose repetition has the effects of one: they are made again where a gateway is lost before it has answered.
The messages of a sound come one by one; all others have one message."""
_MOST_TRIES = 8
"""Further calls at gateways that are lost; the pauses between them grow, so that a gateway may start anew."""
MOST_CALLS = 1024
"""Of all clients at the same time: so many a gateway allows on one connection, and a relay has one to each. Further
calls would wait in this process, unseen; they end in RESOURCE_EXHAUSTED."""
_WAIT_SECONDS = 0.5
_LONGEST_SECONDS = 86_400.0
"""Stands for the deadline of a call without one; gateways have a limit of their own."""
_NOT_PASSED = ("user-agent", "te", "content-type")
_NOTE_SECONDS = 10.0
_ENDS = (CallError, errors.TokenloomError, DecodeError)
"""What ends a client's call with a status."""


class RepeatedMessages:
    """Holds the messages of a client that have arrived, so that they can be sent to one gateway after another. A
    further one is read when it is asked for. Use it as a context.

    Attributes:
        are_whole: Whether the first message, and all after it, are still there.
    """

    def __init__(self, requests: AsyncIterator[bytes], room: AdmissionLimit) -> None:
        """``room``: without any left, messages are passed on and not kept."""
        self.are_whole = True
        self._requests = requests
        self._room = room
        self._kept: list[bytes] = []
        self._taken = room.empty()
        self._may_keep = True
        self._next: asyncio.Task[bytes | None] | None = None
        self._reader = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.forget()
        if self._next is not None:
            self._next.cancel()

    def forget(self) -> None:
        """Keep none: the call is not made again."""
        self.are_whole = self.are_whole and not self._kept
        self._may_keep = False
        self._taken.release()
        self._kept.clear()

    async def read_first(self) -> None:
        """Wait for the first message, if there is one. gRPC ends a call as INTERNAL whose gateway refuses it while its
        first message is waited for. Raises ``DeadlineExceeded`` and ``ResourceExhausted``."""
        if (message := await anext(Impatient(self._requests), None)) is not None:
            self._taken.absorb(take_room(self._room, message))
            self._kept.append(message)

    def from_the_first(self, most: int | None = None) -> AsyncIterator[bytes]:
        """Return the messages for a gateway; the iterator before it ends. ``most``: so many only; None: all."""
        self._reader += 1
        # Now: they may be forgotten before gRPC asks for the first one.
        return self._messages(self._reader, tuple(self._kept), most)

    async def _messages(self, reader: int, again: Sequence[bytes], most: int | None) -> AsyncIterator[bytes]:
        for kept in again:
            yield kept
        count = len(again)
        while most is None or count < most:
            # A task of its own: the gateway may be lost while it waits, and no message may be lost with that.
            waiting = self._next = self._next or asyncio.create_task(next_of(self._requests), name="a next message")
            await asyncio.wait((waiting,))
            message = waiting.result()
            if reader != self._reader or message is None:
                return
            self._next = None
            self._keep(message)
            yield message
            count += 1

    def _keep(self, message: bytes) -> None:
        if self._may_keep and self._room.grow(self._taken, len(message)):
            self._kept.append(message)
        else:
            self.forget()
            self.are_whole = False


class _Gateway(NamedTuple):
    channel: grpc.aio.Channel
    stub: Any


class GrpcRelay(grpc.GenericRpcHandler):
    """Passes the calls of gRPC's clients on to gateways.

    Attributes:
        num_calls: Calls that clients have made.
        num_open: Those that are open.
        num_continued: Answers that were continued, and calls that were made again, because a gateway was lost.
        num_lost: Calls that ended because their gateway was lost.
        num_request_bytes, num_response_bytes: Of the messages from clients, and to them.
    """

    def __init__(self, addresses: Sequence[str], max_bytes: int) -> None:
        """Call it in the event loop.

        Args:
            addresses: Of gateways, ``host:port``, ``dns:///name:port`` or ``unix:/path``, at least one.
            max_bytes: Of messages of all calls, until they are answered. The rest of a sound is passed on and not kept
                where they do not suffice; other calls are refused.
        """
        channels = {address: open_channel(address, None) for address in addresses}
        stubs = {
            address: _Gateway(channel, inference_pb2_grpc.InferenceStub(channel))
            for address, channel in channels.items()
        }
        self._gateways = Gateways[_Gateway](stubs)
        self._channels = list(channels.values())
        # Nothing that a gateway has answered is tried again: that is for the client to decide.
        self._retries = Retries(_MOST_TRIES, budget=1.0)
        self._cancellations = AsyncCancellations()
        self._room = AdmissionLimit(max_bytes)
        self._outside = OutsideCalls(MOST_CALLS)
        self.num_calls = self.num_open = self.num_continued = self.num_lost = 0
        self.num_request_bytes = self.num_response_bytes = 0
        self._noted_at = -_NOTE_SECONDS

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return what handles a call; gateways know which methods there are."""
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        answer: Any = partial(self._pass, method)
        if IDEMPOTENCY_KEY not in metadata:  # a client with a key resumes by itself
            if method == _SERVICE + "Generate":
                return self._handler(self._generate, inference_pb2.GenerateResponse.SerializeToString)
            if (course := COURSES.get(method)) is not None:
                answer = partial(self._converse, method, course)
        return self._handler(answer)

    async def close(self) -> None:
        """End the connections to gateways."""
        await self._cancellations.close()
        for channel in self._channels:
            await channel.close()

    def _handler(self, answer: Any, serialize: Callable[[Any], bytes] = bytes) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return a handler that counts messages. ``serialize``: makes bytes of the answer's messages."""

        def arrived(message: bytes) -> bytes:
            self.num_request_bytes += len(message)
            return message

        def leaving(message: Any) -> bytes:
            written = serialize(message)
            self.num_response_bytes += len(written)
            return written

        return grpc.stream_stream_rpc_method_handler(answer, arrived, leaving)

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.num_calls += 1
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1

    async def _generate(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Answer over as many calls as it takes."""
        metadata, calls = _passed(context), list[Call]()

        def open_call(call: NextCall, seconds: float, gateway: _Gateway) -> Call:
            is_new = isinstance(call.request, inference_pb2.GenerateRequest)
            method = gateway.stub.Generate if is_new else gateway.stub.Resume
            if calls:
                self._note_further()
            calls[:] = [method(call.request, timeout=seconds, metadata=(*metadata, *call.metadata))]
            return calls[0]

        self._cancellations.prepare()
        with self._counted(), contextlib.ExitStack() as at_end:
            try:
                first = await only_message(requests)
                at_end.enter_context(take_room(self._room, first))
                request = decoded(inference_pb2.GenerateRequest, first)
                del first  # its bytes are not kept as well
                left = context.time_remaining()
                deadline = time.monotonic() + (_LONGEST_SECONDS if left is None else left)
                course = AnswerCourse(request, self._retries, deadline, time.monotonic, may_restart=False)
                responses = AsyncResponses(course, self._gateways, open_call, partial(self._cancel, metadata))
                at_end.callback(responses.close)  # also where the client has left
                async for response in responses:
                    if course.is_first:
                        await context.send_initial_metadata(tuple(await calls[0].initial_metadata() or ()))
                    yield response
                context.set_trailing_metadata(tuple(await calls[0].trailing_metadata() or ()))
            except _ENDS as error:
                await self._abort(context, error)

    def _cancel(self, metadata: Metadata, request: inference_pb2.InferenceCancelRequest) -> None:
        cancel = self._gateways.current.stub.Cancel
        self._cancellations.add(partial(cancel, request, timeout=CLOSE_SECONDS, metadata=metadata))

    async def _pass(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Pass the messages of a call on in both directions, as they are."""
        metadata, is_repeated = _passed(context), method in _REPEATED
        most = 1 if is_repeated and method != _TRANSCRIBE else None
        has_begun, has_reached, tries = False, False, 0
        with self._counted(), contextlib.ExitStack() as at_end:
            try:
                if method == WATCH:
                    at_end.enter_context(self._outside.take_watch())
                sent = at_end.enter_context(RepeatedMessages(requests, self._room))
                await sent.read_first()
                while True:
                    gateway = self._gateways.current
                    opened: Any = gateway.channel.stream_stream(method)
                    call = opened(sent.from_the_first(most), timeout=context.time_remaining(), metadata=metadata)
                    try:
                        await call.wait_for_connection()
                        has_reached = True
                        if not is_repeated:
                            sent.forget()
                        async for message in call:
                            if not has_begun:
                                has_begun = self._gateways.have_answered = True
                                sent.forget()
                                await context.send_initial_metadata(tuple(await call.initial_metadata() or ()))
                            yield message
                        context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
                        return
                    except CallError as failed:
                        tries += 1
                        # A call with which no gateway was reached has had no effect.
                        may_repeat = sent.are_whole and not has_begun and (is_repeated or not has_reached)
                        if not (may_repeat and was_cut(failed) and await self._found_another(gateway, failed, tries)):
                            raise
                    finally:
                        call.cancel()
            except _ENDS as error:
                await self._abort(context, error)

    async def _converse(
        self, method: str, make: Callable[[], Course], requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[bytes]:
        """Answer a call turn by turn, over as many calls as it takes."""
        course = make()
        metadata = (*_passed(context), *course.metadata)
        gateway = self._gateways.current

        async def open_next(after: tuple[CallError, int] | None) -> Any:
            nonlocal gateway
            if after is not None and not await self._found_another(gateway, *after):
                raise after[0]
            gateway = self._gateways.current
            opened: Any = gateway.channel.stream_stream(method)
            return opened(timeout=context.time_remaining(), metadata=metadata)

        self._cancellations.prepare()
        with self._counted():
            talk = RelayedTurns(course, requests, open_next, self._room)
            try:
                async for message in talk.answers():
                    if not talk.has_head:
                        talk.has_head = self._gateways.have_answered = True
                        await context.send_initial_metadata(tuple(await talk.call.initial_metadata() or ()))
                    yield message
                if talk.call is not None:
                    context.set_trailing_metadata(tuple(await talk.call.trailing_metadata() or ()))
            except _ENDS as error:
                await self._abort(context, error)
            finally:
                talk.close()
                if (request := course.cancellation()) is not None:
                    self._cancel(_passed(context), request)

    async def _found_another(self, gateway: _Gateway, failed: CallError, tries: int) -> bool:
        """Leave the gateway of a call that was lost, and wait until the next call may be made. Return whether one is to
        be made. ``tries``: how many failed in a row."""
        if tries > _MOST_TRIES:
            return False
        try:
            self._gateways.try_another(gateway, details_of(failed))
        except errors.Unavailable:
            return False
        await asyncio.sleep(_WAIT_SECONDS * (tries - 1))
        self._note_further()
        return True

    def _note_further(self) -> None:
        """Count one more call in the place of one that was lost, and log it now and then."""
        self.num_continued += 1
        if (now := time.monotonic()) - self._noted_at >= _NOTE_SECONDS:
            self._noted_at = now
            log.warning("a gateway was lost; answers continued and calls made again until now: %d", self.num_continued)

    async def _abort(self, context: Any, error: Exception) -> None:
        """End a call with the status that a gateway gave, or with an error of ours."""
        failed = error if isinstance(error, CallError) else error.__cause__
        if not isinstance(failed, CallError):
            await wire_errors.abort(context, damaged_request() if isinstance(error, DecodeError) else error)
        elif was_cut(failed):  # its text has addresses of the mesh; clients that resume by themselves know its code
            self.num_lost += 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "The connection to the gateway was lost; retry.")
        else:
            await context.abort(failed.code(), details_of(failed), tuple(failed.trailing_metadata() or ()))


def _passed(context: Any) -> Metadata:
    """Return the metadata of a client's call that is not of its own connection."""
    given = context.invocation_metadata() or ()
    return tuple((key, value) for key, value in given if key not in _NOT_PASSED and not key.startswith("grpc-"))

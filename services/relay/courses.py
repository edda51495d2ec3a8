"""Holds a client's call while the calls behind it, at gateways, come and go; and says how the turns of calls other than
``Inference.Generate`` are continued. The mesh keeps a request for that if it is asked to; clients that ask for it
themselves resume themselves."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc.aio

from tokenloom.client.answer_course import IDEMPOTENCY_KEY
from tokenloom.client.async_calls import CallError, was_cut
from tokenloom.request import errors, wire_errors
from tokenloom.request.limits import AdmissionLimit, Reservation
from tokenloom.services.runtime.host import servicer_edge
from tokenloom.services.runtime.host.limits import decoded
from tokenloom.v1 import inference_pb2, types_pb2
from tokenloom.v1.inference_pb2 import InferenceCancelRequest
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb2
from tokenloom.v1.vllm import vllm_engine_pb2


async def next_of(requests: AsyncIterator[bytes]) -> bytes | None:
    """Return the next message of a client; None: there is none."""
    return await anext(requests, None)


def take_room(room: AdmissionLimit, message: bytes) -> Reservation:
    """Take room for a message that is kept until it is answered. Raises ``ResourceExhausted``."""
    if (taken := room.take(len(message))) is None:
        state = f"the relay holds {room.taken} of {room.size} bytes of messages that are not answered"
        raise errors.ResourceExhausted(f"{state}; retry", retry_after=1.0)
    return taken


class Course(Protocol):
    """Follows the turns of a call: a message of its client, and what answers it.

    Attributes:
        metadata: Of each call at a gateway.
        is_single: Whether the client sends one message, whose answer ends with the call.
        is_over: Whether the turn has its whole answer.
    """

    metadata: Sequence[tuple[str, str]]
    is_single: bool
    is_over: bool

    def begin(self, message: bytes) -> Sequence[bytes]:
        """Return what is sent for the next message of the client."""

    def take(self, message: bytes) -> Iterable[bytes]:
        """Return what the client gets of a gateway's message."""

    def again(self) -> Sequence[bytes] | None:
        """Return what continues the turn in a new call; None: nothing can."""

    def cancellation(self) -> InferenceCancelRequest | None:
        """Return what ends the turn at the mesh when the client leaves; None: it has ended, or ends with its call."""


OpenNext = Callable[[tuple[CallError, int] | None], Awaitable[Any]]
"""Opens a call at a gateway. Takes how the call before it failed, and how many failed in a row; None: it is the first.
Raises that failure where no further one is to be made."""


class RelayedTurns:
    """Answers a client's call turn by turn, over as many calls as it takes.

    Attributes:
        call: The one at a gateway; None: there is none.
        has_head: Whether the client has its initial metadata; set by the caller.
    """

    def __init__(
        self, course: Course, requests: AsyncIterator[bytes], open_next: OpenNext, room: AdmissionLimit
    ) -> None:
        """``room``: for the message that is answered and the one before it, from which a session goes on."""
        self.call: Any = None
        self.has_head = False
        self._course = course
        self._requests = requests
        self._open_next = open_next
        self._room = room
        self._kept, self._kept_before = room.empty(), room.empty()
        self._asked: asyncio.Task[bytes | None] | None = None
        self._reading: asyncio.Task[Any] | None = None
        self._lost: CallError | None = None
        """How the call has failed whose turns were all answered."""
        self._num_failed = 0

    async def answers(self) -> AsyncIterator[bytes]:
        """Yield what the client gets. Raises ``CallError``: how the call at a gateway has ended; and
        ``ResourceExhausted`` and ``DeadlineExceeded`` for messages that are too large, or do not come."""
        course = self._course
        while (message := await self._next_message()) is not None:
            taken = take_room(self._room, message)
            self._kept_before.release()
            self._kept_before, self._kept = self._kept, taken
            sent: Sequence[bytes] | None = course.begin(message)
            self._num_failed = 0
            if self._lost is not None:  # and with it what was said before
                lost, self._lost = self._lost, None
                sent = await self._after(lost)
            while sent is not None:
                try:
                    async for each in self._turn(sent):
                        yield each
                    sent = None
                except CallError as failed:
                    sent = await self._after(failed)
            if course.is_single or not course.is_over:  # the gateway has ended the call
                return
        async for each in self._last_words():
            yield each

    def close(self) -> None:
        """End the call at the gateway. Idempotent."""
        if self._asked is not None:
            self._asked.cancel()
        self._leave()
        self._kept_before.release()
        self._kept.release()

    async def _turn(self, sent: Sequence[bytes]) -> AsyncIterator[bytes]:
        if self.call is None:
            self.call = await self._open_next(None)
        # What a write raises whose call has ended; reading says why it has.
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            for message in sent:
                await self.call.write(message)
            if self._course.is_single:
                await self.call.done_writing()
        while not self._course.is_over or self._course.is_single:
            if (response := await self._read()) is grpc.aio.EOF:
                self._course.is_over = self._course.is_single
                return
            self._num_failed = 0
            for each in self._course.take(response):
                yield each

    async def _after(self, failed: CallError) -> Sequence[bytes]:
        """Return what continues the turn at the next gateway, to which a call is open. Raises the failure where nothing
        does."""
        error = wire_errors.from_rpc(failed)
        # An earlier call of this one, delayed on its way, has taken the answer from the last one.
        is_taken = self._num_failed > 0 and isinstance(error, errors.Aborted)
        if not (was_cut(failed) or is_taken or error.reason == errors.GatewayLeaving.reason):
            self._course.is_over = True  # by the mesh, which has nothing to cancel
            raise failed
        if (sent := self._course.again()) is None:
            raise failed
        self._leave()
        self._num_failed += 1
        self.call = await self._open_next((failed, self._num_failed))
        return sent

    async def _next_message(self) -> bytes | None:
        """Return the next message of the client; None: there is none. Raises ``CallError`` if the gateway has ended the
        call meanwhile. One that is lost meanwhile is left: the next turn finds another. Raises ``DeadlineExceeded`` for
        a client that is silent while there is no call at a gateway."""
        asked = self._asked = asyncio.create_task(next_of(self._requests), name="a next turn")
        while not asked.done():
            reading = None if self.call is None else self._begin_reading()
            # A gateway bounds how long its client is silent.
            limit = servicer_edge.MESSAGE_SECONDS if reading is None else None
            waited = (asked,) if reading is None else (asked, reading)
            if not (await asyncio.wait(waited, timeout=limit, return_when=asyncio.FIRST_COMPLETED))[0]:
                raise servicer_edge.not_arrived()
            if asked.done() or reading is None:
                continue
            try:
                await reading
            except CallError as failed:
                if not was_cut(failed):
                    raise
                self._lost = failed
                self._leave()
                continue
            return None  # the gateway has ended the call, or has sent an answer without a question
        self._asked = None
        return asked.result()

    async def _last_words(self) -> AsyncIterator[bytes]:
        """Let the gateway end the call, after the client."""
        if self._lost is not None:
            return
        if self.call is None:
            self.call = await self._open_next(None)
        await self.call.done_writing()
        try:
            while (response := await self._read()) is not grpc.aio.EOF:
                for each in self._course.take(response):
                    yield each
        except CallError as failed:
            if not was_cut(failed) or not self._course.is_over:
                raise

    def _begin_reading(self) -> "asyncio.Task[Any]":
        # A task that stays: gRPC ends a call whose reader is cancelled.
        self._reading = self._reading or asyncio.create_task(self.call.read(), name="read from a gateway")
        return self._reading

    async def _read(self) -> Any:
        if (reading := self._reading) is None:
            return await self.call.read()
        try:
            return await reading
        finally:
            self._reading = None

    def _leave(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            if self._reading.done() and not self._reading.cancelled():
                self._reading.exception()  # an error that no code takes is logged by asyncio
            self._reading = None
        if self.call is not None:
            self.call.cancel()
            self.call = None


class _OneTurn:
    """What a course has that changes nothing."""

    metadata: Sequence[tuple[str, str]] = ()
    is_single = False
    is_over = True


class SessionCourse(_OneTurn):
    """Follows ``Inference.GenerateSession``: a turn is sent once more with ``continued_turn``, from which the mesh
    finds all that was said before it. A turn of which nothing has arrived follows the one before, which is sent so."""

    def __init__(self) -> None:
        self._turn = inference_pb2.GenerateRequest()
        self._position = inference_pb2.TurnPosition()
        self._before: inference_pb2.GenerateRequest | None = None
        self._is_own = True
        self._old_id = ""

    def begin(self, message: bytes) -> Sequence[bytes]:
        if self._position.request_id and self.is_over:
            self._before, self._old_id = self._continued(), self._position.request_id
        self._turn, self._position = decoded(inference_pb2.GenerateRequest, message), inference_pb2.TurnPosition()
        self.is_over = False
        self._is_own = self._is_own and not (self._turn.resumable or self._turn.HasField("continued_turn"))
        if not self._is_own:
            return (message,)
        self._turn.resumable = True
        return (self._turn.SerializeToString(),)

    def take(self, message: bytes) -> Iterable[bytes]:
        response = inference_pb2.GenerateResponse.FromString(message)
        if response.request_id and response.request_id == self._old_id:
            return ()  # the usage of a turn that the client has
        self._position.request_id, position = response.request_id, self._position.position
        position.num_tokens = response.token_index + len(response.token_ids)
        position.text_length = response.text_length
        position.num_prompt_logprobs += len(response.prompt_logprobs.sampled)
        # The usage of a turn that goes on comes without its end where the client has that.
        has_ended = response.finish_reason != types_pb2.FINISH_REASON_UNSPECIFIED
        position.finished = position.finished or has_ended
        self.is_over = response.HasField("usage")
        return (message,)

    def again(self) -> Sequence[bytes] | None:
        if not self._is_own:
            return None
        if self._position.request_id:
            return (self._continued().SerializeToString(),)
        turn = self._turn.SerializeToString()
        return (turn,) if self._before is None else (self._before.SerializeToString(), turn)

    def cancellation(self) -> InferenceCancelRequest | None:
        if self.is_over or not self._is_own or not self._position.request_id:
            return None
        return InferenceCancelRequest(request_id=self._position.request_id)

    def _continued(self) -> inference_pb2.GenerateRequest:
        continued = inference_pb2.GenerateRequest()
        continued.CopyFrom(self._turn)
        continued.continued_turn.CopyFrom(self._position)
        return continued


_RESUMABLE, _EVENT_ID, _LAST_EVENT_ID, _FINAL = "resumable", "event_id", "last_event_id", "triton_final_response"


class _KServeCourse(_OneTurn):
    """Marks a request so that the mesh keeps it: its id becomes one of ours, which is its idempotency key, and the
    client gets its own back."""

    def __init__(self) -> None:
        self._request = kserve_pb2.ModelInferRequest()
        self._id = ""
        self._is_own = True

    def begin(self, message: bytes) -> Sequence[bytes]:
        self._request = decoded(kserve_pb2.ModelInferRequest, message)
        self._id, self.is_over = self._request.id, False
        self._is_own = not {_RESUMABLE, _LAST_EVENT_ID} & set(self._request.parameters)
        if not self._is_own:
            return (message,)
        self._request.id = secrets.token_hex(16)
        self._request.parameters[_RESUMABLE].bool_param = True
        return (self._request.SerializeToString(),)

    def again(self) -> Sequence[bytes] | None:
        return (self._request.SerializeToString(),) if self._is_own else None

    def cancellation(self) -> InferenceCancelRequest | None:
        if self.is_over or not self._is_own or not self._request.id:
            return None
        return InferenceCancelRequest(idempotency_key=self._request.id)


class InferCourse(_KServeCourse):
    """Follows ``ModelInfer``: repeated under its key, it gets the answer that the first one began."""

    is_single = True

    def take(self, message: bytes) -> Iterator[bytes]:
        if self.is_over:  # made once more, because its end was lost
            return
        response = kserve_pb2.ModelInferResponse.FromString(message)
        self.is_over = True
        if self._is_own:
            response.id = self._id
            message = response.SerializeToString()
        yield message


class StreamInferCourse(_KServeCourse):
    """Follows ``ModelStreamInfer``: a stream goes on after its last event, whose id the client does not see."""

    def begin(self, message: bytes) -> Sequence[bytes]:
        self._last_event, self._has_part = "", False
        return super().begin(message)

    def take(self, message: bytes) -> Iterator[bytes]:
        response = kserve_pb2.ModelStreamInferResponse.FromString(message)
        found = response.infer_response
        self._has_part = True
        is_final = _FINAL in found.parameters and found.parameters[_FINAL].bool_param
        self.is_over = is_final or bool(response.error_message)
        if self._is_own:
            found.id = self._id
            if _EVENT_ID in found.parameters:
                self._last_event = found.parameters.pop(_EVENT_ID).string_param
        yield response.SerializeToString()

    def again(self) -> Sequence[bytes] | None:
        if not self._is_own or (self._has_part and not self._last_event):
            return None
        if not self._last_event:
            return super().again()
        continued = kserve_pb2.ModelInferRequest()
        continued.CopyFrom(self._request)
        continued.parameters[_LAST_EVENT_ID].string_param = self._last_event
        return (continued.SerializeToString(),)


class VllmCourse(_OneTurn):
    """Follows ``Generate`` of vLLM's engines: repeated under its key, the answer comes from its beginning, and what the
    client has of it is left out."""

    is_single = True

    def __init__(self) -> None:
        self._key = secrets.token_hex(16)
        self.metadata = ((IDEMPOTENCY_KEY, self._key),)
        self._message = b""
        self._num_tokens: dict[int, int] = {}
        self._ended: set[int] = set()
        self.is_over = False

    def begin(self, message: bytes) -> Sequence[bytes]:
        self._message = message
        return (message,)

    def take(self, message: bytes) -> Iterator[bytes]:
        response = vllm_engine_pb2.GenerateResponse.FromString(message)
        if response.WhichOneof("response") == "complete":
            if response.complete.index not in self._ended:
                self._ended.add(response.complete.index)
                yield message
            return
        chunk = response.chunk
        num_new = chunk.completion_tokens - self._num_tokens.get(chunk.index, 0)
        if num_new <= 0:
            return
        self._num_tokens[chunk.index] = chunk.completion_tokens
        if num_new >= len(chunk.token_ids):
            yield message
            return
        _keep_last(chunk, num_new)
        yield response.SerializeToString()

    def again(self) -> Sequence[bytes] | None:
        return (self._message,)

    def cancellation(self) -> InferenceCancelRequest | None:
        return None if self.is_over else InferenceCancelRequest(idempotency_key=self._key)


def _keep_last(chunk: vllm_engine_pb2.GenerateStreamChunk, count: int) -> None:
    """Leave the last tokens of a chunk, with their log probabilities."""
    logprobs = chunk.output_logprobs
    for values in (chunk.token_ids, logprobs.token_logprobs, logprobs.token_ids, logprobs.top_logprobs):
        if len(values) > count:
            del values[: len(values) - count]


COURSES: Mapping[str, Callable[[], Course]] = {
    "/tokenloom.v1.Inference/GenerateSession": SessionCourse,
    "/inference.GRPCInferenceService/ModelInfer": InferCourse,
    "/inference.GRPCInferenceService/ModelStreamInfer": StreamInferCourse,
    "/vllm.grpc.engine.VllmEngine/Generate": VllmCourse,
}
"""By the names of methods."""

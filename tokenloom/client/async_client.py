"""Implements the client, and its sessions, for asyncio: each answer is read over as many calls as it takes."""

import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

from . import connection
from .answer_course import AnswerCourse, NextCall, Retries
from .async_calls import (
    CANNOT_WRITE,
    CLOSE_SECONDS,
    AsyncCancellations,
    AsyncTurns,
    Call,
    CallError,
    collected,
    details_of,
    error_of,
    open_channel,
    sleep,
    was_cut,
)
from .client_request import chat_request, check_streamed, prompt_request, transcribe_requests
from .options import ChatArguments, Message, Prompt, PromptArguments, TurnArguments, takes
from .pooled import Pooled, PoolInput, classify_request, embed_request, pool_request, read_pooled, score_request
from .results import AnswerCollector, Chunk, ChunkReader, Generation, Model, Transcribed, read_model, read_transcribed

T = TypeVar("T")
Open: TypeAlias = Callable[[NextCall, float, Any], Call]
"""Makes a call with a limit in seconds, by the stub of a gateway."""
Cancel: TypeAlias = Callable[[inference_pb2.InferenceCancelRequest], object]
"""Ends a request at the mesh; does not wait, and may be called from ``__del__``."""


class AsyncResponses(AsyncIterator[inference_pb2.GenerateResponse]):
    """Yields each response of an answer once. Raises any of :mod:`errors`."""

    def __init__(
        self, course: AnswerCourse, gateways: connection.Gateways[Any], open_call: Open, cancel: Cancel
    ) -> None:
        self._course = course
        self._gateways = gateways
        self._open = open_call
        self._cancel = cancel
        self._stub: Any = None
        self._call: Call | None = None
        self._reading: AsyncIterator[inference_pb2.GenerateResponse] | None = None
        self._is_closed = False
        self._has_called = False

    async def __anext__(self) -> inference_pb2.GenerateResponse:
        while True:
            if self._is_closed:
                raise errors.Cancelled("The request was cancelled.")
            if self._reading is None:
                self._has_called = True
                self._stub = self._gateways.current
                self._call = self._open(self._course.next_call(), self._course.seconds_left, self._stub)
                self._reading = aiter(self._call)
            try:
                response = await anext(self._reading)
            except StopAsyncIteration:
                self._course.end()
                raise
            except CallError as failed:
                await self._recover(failed)
            else:
                self._gateways.have_answered = True
                self._course.take(response)
                return response

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._is_closed = True
        if self._call is not None:
            self._call.cancel()
        # The mesh would keep the request for a while after its call.
        if self._has_called and (request := self._course.cancellation()) is not None:
            self._cancel(request)

    def __del__(self) -> None:
        self.close()  # a call is part of a cycle, and would live until that is collected

    async def _recover(self, failed: CallError) -> None:
        """Wait until the next call may be made. Raises the final error."""
        error = error_of(failed)
        if self._is_closed:
            raise error from failed
        self._call = self._reading = None
        try:
            if _try_another(self._gateways, self._stub, failed, error):
                return
            wait = self._course.failed(error, was_cut=was_cut(failed))
        except errors.TokenloomError as final:
            raise final from failed
        # A gateway that reports the loss of a request is well; the next one may be the one that was lost.
        if error.reason != errors.RequestLost.reason:
            self._gateways.leave(self._stub)
        await sleep(wait)


class AsyncStream(AsyncIterator[Chunk]):
    """Yields chunks. Leaving an ``async with`` block, :meth:`close` or the deletion of the stream cancels
    the request; so does a ``break`` out of ``async for chunk in await client.stream(…)``, which holds the only
    reference."""

    def __init__(
        self, responses: AsyncResponses, first: inference_pb2.GenerateResponse | None, reader: ChunkReader
    ) -> None:
        self._responses = responses
        self._first = first
        self._reader = reader

    async def __anext__(self) -> Chunk:
        response, self._first = self._first, None
        return self._reader.read(await anext(self._responses) if response is None else response)

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._responses.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


class AsyncSession:
    """Turns, one after the other, each of which continues what was said in those before. Use as ``async with``.

    Nothing is tried again: the gateway holds the session, and a turn that fails ends it.
    """

    def __init__(self, turns: AsyncTurns) -> None:
        self._turns = turns
        self._is_answering = False

    @takes(TurnArguments)
    async def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Continue with a text or token ids and wait for the whole answer. Raises any of :mod:`errors`."""
        request = prompt_request(prompt, options)
        collector = AnswerCollector(request)
        async for response in self._turn(request):
            collector.add(response)
        return collector.result()

    @takes(TurnArguments)
    def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Chunk]:
        """Like :meth:`generate`, but yield chunks. If they are not read to the end, the next turn skips the rest."""
        request = prompt_request(prompt, options)
        check_streamed(request)
        return self._chunks(request)

    async def close(self) -> None:
        """End the session and cancel a turn that is not answered yet. Idempotent."""
        if self._is_answering:
            self._turns.cancel()
        else:
            await self._turns.end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _chunks(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[Chunk]:
        reader = ChunkReader(request)
        async for response in self._turn(request):
            yield reader.read(response)

    async def _turn(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[inference_pb2.GenerateResponse]:
        while self._is_answering:
            await self._read()
        try:
            await self._turns.write(request)
        except CANNOT_WRITE:
            await self._read()  # says why the session ended
            raise
        self._is_answering = True
        while self._is_answering:
            yield await self._read()

    async def _read(self) -> inference_pb2.GenerateResponse:
        try:
            response = await self._turns.read()
        except CallError as error:
            self._is_answering = False
            raise error_of(error) from error
        if response is None:
            self._is_answering = False
            raise errors.Unavailable("the gateway ended the session")
        self._is_answering = response.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
        return response


class AsyncClient:
    """Talks to a gateway, within one event loop. Cancelling a task that waits for an answer
    cancels the request. ``close`` the client, or use ``async with``.

    Args:
        address: The gateway's gRPC ``host:port``, or ``unix:/path``; several, separated by commas: the client uses one
            until it fails, and then the next.
        api_key: Sent with every call.
        tls: See :data:`connection.TLS`.
        timeout: Seconds that a call may take, retries included, unless the call sets its own.
        retries: When to retry; None: the default.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: connection.TLS = False,
        timeout: float = 600.0,
        retries: Retries | None = None,
    ) -> None:
        secret = connection.credentials(tls)
        addresses = connection.addresses(address)
        self._channels = [open_channel(each, secret) for each in addresses]
        stubs = map(inference_pb2_grpc.InferenceStub, self._channels)
        self._gateways = connection.Gateways(dict(zip(addresses, stubs, strict=True)))
        self._metadata = connection.metadata(api_key)
        self._timeout = timeout
        self._retries = retries or Retries()
        self._cancellations = AsyncCancellations()

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        answer = await self._retrying(
            lambda stub, left: stub.ListModels(request, timeout=left, metadata=self._metadata), timeout
        )
        return list(map(read_model, answer.models))

    async def embed(self, inputs: Sequence[PoolInput], *, timeout: float | None = None, **options: Any) -> Pooled:
        """Return one vector for each input, at most 2048.

        ``options``: ``model``, ``dimensions``, ``normalize``, ``prompt_name``, ``truncate_prompt_tokens``,
        ``priority``. Raises any of :mod:`errors`.
        """
        return await self._pooled("Embed", embed_request(inputs, **options), timeout)

    async def classify(self, inputs: Sequence[PoolInput], *, timeout: float | None = None, **options: Any) -> Pooled:
        """Like :meth:`embed`, but return the probabilities of the model's classes; ``use_activation`` False: logits."""
        return await self._pooled("Classify", classify_request(inputs, **options), timeout)

    async def score(
        self, query: str, documents: Sequence[str], *, timeout: float | None = None, **options: Any
    ) -> Pooled:
        """Like :meth:`embed`, but return the relevance of each document to the query."""
        return await self._pooled("Score", score_request(query, documents, **options), timeout)

    async def pool(
        self, inputs: Sequence[PoolInput], task: str, *, timeout: float | None = None, **options: Any
    ) -> Pooled:
        """Like :meth:`embed`, but return what a task computes, such as ``token_embed``: a vector for each token."""
        return await self._pooled("Pool", pool_request(inputs, task, **options), timeout)

    async def transcribe(self, sound: bytes, *, timeout: float | None = None, **options: Any) -> Transcribed:
        """Return what is said in the bytes of a sound's file.

        ``options``: ``model``, ``translate`` (into English), ``language``, ``prompt`` (text before it),
        ``temperature``, ``seed``, ``return_segments``, ``return_words``. Raises any of :mod:`errors`.
        """
        requests = transcribe_requests(sound, options)

        async def call(stub: Any, left: float) -> Transcribed:
            responses = stub.Transcribe(iter(requests), timeout=left, metadata=self._metadata)
            return read_transcribed(await collected(responses))

        return await self._retrying(call, timeout)

    @takes(PromptArguments)
    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> Generation:
        """Continue a text or token ids and return the whole answer. ``model`` None: the served model.

        Raises any of :mod:`errors`.
        """
        return await self._generate(prompt_request(prompt, options), timeout)

    @takes(PromptArguments)
    async def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> AsyncStream:
        """Like the method without ``stream``, but return a stream of chunks, once the first has arrived."""
        return await self._stream(prompt_request(prompt, options), timeout)

    @takes(ChatArguments)
    async def chat(self, messages: Sequence[Message], *, timeout: float | None = None, **options: Any) -> Generation:
        """Return the next turn of a conversation. Raises any of :mod:`errors`."""
        return await self._generate(chat_request(messages, options), timeout)

    @takes(ChatArguments)
    async def stream_chat(
        self, messages: Sequence[Message], *, timeout: float | None = None, **options: Any
    ) -> AsyncStream:
        """Like the method without ``stream``, but return a stream of chunks, once the first has arrived."""
        return await self._stream(chat_request(messages, options), timeout)

    def session(self, *, timeout: float | None = None) -> AsyncSession:
        """Open a session, whose prompt continues after each answer. ``timeout``: its seconds; None: no limit."""
        return AsyncSession(AsyncTurns(self._gateways.current.GenerateSession, timeout, self._metadata))

    async def close(self) -> None:
        """End every call. Idempotent."""
        await self._cancellations.close()
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _generate(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Generation:
        course, responses = self._responses(request, timeout, may_restart=True)
        collector = AnswerCollector(request)
        try:
            async for response in responses:
                if course.is_first:
                    collector = AnswerCollector(request)
                collector.add(response)
        finally:
            responses.close()  # after an exception elsewhere no caller waits any more
        return collector.result()

    async def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        check_streamed(request)
        _, responses = self._responses(request, timeout, may_restart=False)
        return AsyncStream(responses, await anext(responses, None), ChunkReader(request))

    def _responses(
        self, request: inference_pb2.GenerateRequest, timeout: float | None, *, may_restart: bool
    ) -> tuple[AnswerCourse, AsyncResponses]:
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        course = AnswerCourse(request, self._retries, deadline, time.monotonic, may_restart=may_restart)
        self._cancellations.prepare()
        return course, AsyncResponses(course, self._gateways, self._open, self._cancel)

    async def _pooled(self, method: str, request: object, timeout: float | None) -> Pooled:
        async def call(stub: Any, left: float) -> Pooled:
            responses = getattr(stub, method)(request, timeout=left, metadata=self._metadata)
            return read_pooled(await collected(responses))

        return await self._retrying(call, timeout)

    def _open(self, call: NextCall, seconds: float, stub: Any) -> Call:
        is_new = isinstance(call.request, inference_pb2.GenerateRequest)
        method = stub.Generate if is_new else stub.Resume
        opened: Call = method(call.request, timeout=seconds, metadata=(*self._metadata, *call.metadata))
        return opened

    def _cancel(self, request: inference_pb2.InferenceCancelRequest) -> None:
        """End a request at the mesh, without waiting for it."""
        stub: Any = self._gateways.current
        self._cancellations.add(partial(stub.Cancel, request, timeout=CLOSE_SECONDS, metadata=self._metadata))

    async def _retrying(self, attempt: Callable[[Any, float], Awaitable[T]], timeout: float | None) -> T:
        """Retry ``attempt``, which receives the stub of a gateway and the seconds that are left."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        for failures in itertools.count():
            stub = self._gateways.current
            try:
                result = await attempt(stub, deadline - time.monotonic())
            except CallError as failed:
                await sleep(self._wait_after(failed, stub, failures, deadline - time.monotonic()))
            else:
                self._gateways.have_answered = True
                self._retries.succeeded()
                return result
        raise AssertionError("count ended")

    def _wait_after(self, failed: CallError, stub: Any, failures: int, seconds_left: float) -> float:
        """Return after how many seconds the call is made again. Raises the final error."""
        error = error_of(failed)
        try:
            if _try_another(self._gateways, stub, failed, error):
                return 0.0
            wait = self._retries.wait(error, failures, seconds_left)
            if wait is None:
                raise error
        except errors.TokenloomError as final:
            raise final from failed
        self._gateways.leave(stub)
        return wait


def _try_another(
    gateways: connection.Gateways[Any], stub: Any, failed: CallError, error: errors.TokenloomError
) -> bool:
    """Return whether the next gateway is to be called at once. Raises ``Unavailable`` if none can be connected to.

    The ``error`` of a connection gets gRPC's text, which services hide: here the addresses are the caller's own.
    """
    if not was_cut(failed):
        gateways.have_answered = True
        return False
    details = details_of(failed)
    if error.retry_after is not None:
        error.message = gateways.describe(stub, details)
    return gateways.try_another(stub, details)

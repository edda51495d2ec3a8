"""Implements the client for asyncio."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

from . import connection
from .async_session import AsyncSession
from .client_request import chat_request, check_streamed, prompt_request
from .options import ChatArguments, Message, Prompt, PromptArguments, takes
from .results import Chunk, ChunkReader, Collector, Generation, Model, read_model
from .retries import Retries

T = TypeVar("T")
Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class AsyncStream(AsyncIterator[Chunk]):
    """Yields chunks. Leaving an ``async with`` block, :meth:`close` or the deletion of the stream cancels
    the request; so does a ``break`` out of ``async for chunk in await client.stream(…)``, which holds the only
    reference."""

    def __init__(self, call: Call, reader: ChunkReader) -> None:
        self._call = call
        self._responses = aiter(call)
        self._first: inference_pb2.GenerateResponse | None = None
        self._reader = reader

    async def begin(self) -> None:
        """Wait for the first response; a failure before it may be retried."""
        self._first = await anext(self._responses, None)

    async def __anext__(self) -> Chunk:
        response, self._first = self._first, None
        if response is None:
            try:
                response = await anext(self._responses)
            except grpc.aio.AioRpcError as error:
                raise errors.from_rpc(error) from error
        return self._reader.read(response)

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._call.cancel()

    def __del__(self) -> None:
        if not self._call.done():
            self._call.cancel()  # the call itself is part of a cycle, and would live until that is collected

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """Talks to a gateway, within one event loop; ``close`` it, or use ``async with``. Cancelling a task that waits for
    an answer cancels the request.

    Args:
        address: The gateway's gRPC ``host:port``, or ``unix:/path``.
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
        options = connection.channel_options(address)
        credentials = connection.credentials(tls)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=options)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = connection.metadata(api_key)
        self._timeout = timeout
        self._retries = retries or Retries()

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        answer = await self._retrying(
            lambda left: self._stub.ListModels(request, timeout=left, metadata=self._metadata), timeout
        )
        return list(map(read_model, answer.models))

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
        return AsyncSession(self._stub.GenerateSession(timeout=timeout, metadata=self._metadata))

    async def close(self) -> None:
        """End every call. Idempotent."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _generate(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Generation:
        async def attempt(left: float) -> Generation:
            collector = Collector(request)
            call = self._stub.Generate(request, timeout=left, metadata=self._metadata)
            try:
                async for response in call:
                    collector.add(response)
            finally:
                call.cancel()  # after an exception elsewhere no caller waits any more
            return collector.result()

        return await self._retrying(attempt, timeout)

    async def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        check_streamed(request)

        async def attempt(left: float) -> AsyncStream:
            call = self._stub.Generate(request, timeout=left, metadata=self._metadata)
            stream = AsyncStream(call, ChunkReader(request))
            await stream.begin()
            return stream

        return await self._retrying(attempt, timeout)

    async def _retrying(self, attempt: Callable[[float], Awaitable[T]], timeout: float | None) -> T:
        """Retry ``attempt``, which receives the seconds that are left."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        for failures in itertools.count():
            try:
                result = await attempt(deadline - time.monotonic())
            except grpc.aio.AioRpcError as failed:
                error = errors.from_rpc(failed)
                wait = self._retries.wait(error, failures, deadline - time.monotonic())
                if wait is None:
                    raise error from failed
                await asyncio.sleep(wait)
            else:
                self._retries.succeeded()
                return result
        raise AssertionError("count ended")

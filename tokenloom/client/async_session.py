"""Streaming input: a prompt that goes on after it was answered."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self

import grpc.aio

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import inference_pb2, types_pb2

from .client_request import check_streamed, prompt_request
from .options import Prompt, TurnArguments, takes
from .results import AnswerCollector, Chunk, ChunkReader, Generation

Call = grpc.aio.StreamStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class AsyncSession:
    """Turns, one after the other, each of which continues what was said in those before. Use as ``async with``.

    Nothing is tried again: the gateway holds the session, and a turn that fails ends it.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._is_answering = False

    @takes(TurnArguments)
    async def generate(self, prompt: str | Sequence[int], *, model: str | None = None, **options: Any) -> Generation:
        """Continue with a text or token ids and wait for the whole answer. Raises any of :mod:`errors`."""
        request = prompt_request(prompt, options)
        collector = AnswerCollector(request)
        async for response in self._turn(request):
            collector.add(response)
        return collector.result()

    @takes(TurnArguments)
    async def stream(self, prompt: Prompt, **options: Any) -> AsyncIterator[Chunk]:
        """Like :meth:`generate`, but yield chunks. If they are not read to the end, the next turn skips the rest."""
        request = prompt_request(prompt, options)
        check_streamed(request)
        reader = ChunkReader(request)
        async for response in self._turn(request):
            yield reader.read(response)

    async def close(self) -> None:
        """End the session and cancel a turn that is not answered yet. Idempotent."""
        if self._is_answering:
            self._call.cancel()
        else:
            await self._call.done_writing()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()

    async def _turn(self, request: inference_pb2.GenerateRequest) -> AsyncIterator[inference_pb2.GenerateResponse]:
        while self._is_answering:
            await self._read()
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._read()  # says why the session ended
            raise
        self._is_answering = True
        while self._is_answering:
            yield await self._read()

    async def _read(self) -> inference_pb2.GenerateResponse:
        try:
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            self._is_answering = False
            raise wire_errors.from_rpc(error) from error
        if not isinstance(response, inference_pb2.GenerateResponse):
            self._is_answering = False
            raise errors.Unavailable("the gateway ended the session")
        self._is_answering = response.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
        return response

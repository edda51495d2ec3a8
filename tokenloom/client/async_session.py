"""Streaming input for asyncio: a prompt that goes on after it was answered."""

from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, types_pb2

from .async_calls import CANNOT_WRITE, AsyncTurns, CallError, error_of
from .client_request import check_streamed, prompt_request
from .options import Prompt, TurnArguments, takes
from .results import AnswerCollector, Chunk, ChunkReader, Generation


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

"""Streaming input for code that blocks: a prompt that goes on after it was answered."""

import queue
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

import grpc

from tokenloom.request import errors, wire_errors
from tokenloom.v1 import inference_pb2, types_pb2

from .client_request import check_streamed, prompt_request
from .options import TurnArguments, takes
from .results import AnswerCollector, Chunk, ChunkReader, Generation

Call: TypeAlias = "grpc._CallIterator[inference_pb2.GenerateResponse]"
Open: TypeAlias = Callable[[Iterator[inference_pb2.GenerateRequest]], Call]


class Session:
    """Turns in one thread, each of which continues what was said in those before it. Use as ``with``.

    Nothing is tried again: the gateway holds the session, and a turn that fails ends it.
    """

    def __init__(self, open_call: Open) -> None:
        # At most the turn that is being answered, and the end.
        self._turns: queue.SimpleQueue[inference_pb2.GenerateRequest | None] = queue.SimpleQueue()
        self._call = open_call(cast(Iterator[inference_pb2.GenerateRequest], iter(self._turns.get, None)))
        self._is_answering = False

    @takes(TurnArguments)
    def generate(self, prompt: str | Sequence[int], *, model: str | None = None, **options: Any) -> Generation:
        """Continue with a text or token ids and wait for the whole answer. Raises any of :mod:`errors`."""
        request = prompt_request(prompt, options)
        collector = AnswerCollector(request)
        for response in self._turn(request):
            collector.add(response)
        return collector.result()

    @takes(TurnArguments)
    def stream(self, prompt: str | Sequence[int], *, model: str | None = None, **options: Any) -> Iterator[Chunk]:
        """Like :meth:`generate`, but yield chunks. If they are not read to the end, the next turn skips the rest."""
        request = prompt_request(prompt, options)
        check_streamed(request)
        return map(ChunkReader(request).read, self._turn(request))

    def close(self) -> None:
        """End the session and cancel a turn that is not answered yet. Idempotent."""
        if self._is_answering:
            self._call.cancel()
        self._turns.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _turn(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateResponse]:
        while self._is_answering:
            self._read()
        self._turns.put(request)
        self._is_answering = True
        while self._is_answering:
            yield self._read()

    def _read(self) -> inference_pb2.GenerateResponse:
        try:
            response = next(self._call)
        except grpc.RpcError as error:
            self._is_answering = False
            raise wire_errors.from_rpc(cast(grpc.Call, error)) from error
        except StopIteration:
            self._is_answering = False
            raise errors.Unavailable("the gateway ended the session") from None
        self._is_answering = response.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED
        return response

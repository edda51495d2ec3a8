"""Implements the blocking client."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, cast

import grpc

from tokenloom.request import errors
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

from . import connection
from .client_request import chat_request, check_streamed, prompt_request
from .options import ChatArguments, Message, Prompt, PromptArguments, takes
from .results import Chunk, ChunkReader, Collector, Generation, Model, read_model
from .retries import Retries
from .sync_session import Session

T = TypeVar("T")
Call: TypeAlias = "grpc._CallIterator[inference_pb2.GenerateResponse]"


class Stream(Iterator[Chunk]):
    """Yields chunks as they arrive. Leaving a ``with`` block, :meth:`close` or the deletion of the stream cancels the
    request; so does a ``break`` out of ``for chunk in client.stream(…)``, which holds the only reference."""

    def __init__(self, call: Call, first: inference_pb2.GenerateResponse | None, reader: ChunkReader) -> None:
        self._call = call
        self._first = first
        self._reader = reader

    def __next__(self) -> Chunk:
        response, self._first = self._first, None
        if response is None:
            try:
                response = next(self._call)
            except grpc.RpcError as error:
                raise _translated(error) from error
        return self._reader.read(response)

    def close(self) -> None:
        """Cancel the request unless it has ended. Idempotent."""
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Client:
    """Talks to a gateway. May be shared by threads; ``close`` it, or use ``with``.

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
            self._channel = grpc.insecure_channel(address, options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = connection.metadata(api_key)
        self._timeout = timeout
        self._retries = retries or Retries()

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the served models."""
        request = inference_pb2.ListModelsRequest()
        answer = self._retrying(
            lambda left: self._stub.ListModels(request, timeout=left, metadata=self._metadata), timeout
        )
        return list(map(read_model, answer.models))

    @takes(PromptArguments)
    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> Generation:
        """Continue a text or token ids and return the whole answer. ``model`` None: the served model.

        Raises any of :mod:`errors`.
        """
        return self._generate(prompt_request(prompt, options), timeout)

    @takes(PromptArguments)
    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Any) -> Stream:
        """Like the method without ``stream``, but return a stream of chunks, once the first has arrived."""
        return self._stream(prompt_request(prompt, options), timeout)

    @takes(ChatArguments)
    def chat(self, messages: Sequence[Message], *, timeout: float | None = None, **options: Any) -> Generation:
        """Return the next turn of a conversation. Raises any of :mod:`errors`."""
        return self._generate(chat_request(messages, options), timeout)

    @takes(ChatArguments)
    def stream_chat(self, messages: Sequence[Message], *, timeout: float | None = None, **options: Any) -> Stream:
        """Like the method without ``stream``, but return a stream of chunks, once the first has arrived."""
        return self._stream(chat_request(messages, options), timeout)

    def session(self, *, timeout: float | None = None) -> Session:
        """Open a session, whose prompt continues after each answer. ``timeout``: its seconds; None: no limit."""
        return Session(lambda turns: self._stub.GenerateSession(turns, timeout=timeout, metadata=self._metadata))

    def close(self) -> None:
        """End every call. Idempotent."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _generate(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Generation:
        def attempt(left: float) -> Generation:
            collector = Collector(request)
            call = self._stub.Generate(request, timeout=left, metadata=self._metadata)
            try:
                for response in call:
                    collector.add(response)
            finally:
                call.cancel()  # after an exception elsewhere no caller waits any more
            return collector.result()

        return self._retrying(attempt, timeout)

    def _stream(self, request: inference_pb2.GenerateRequest, timeout: float | None) -> Stream:
        check_streamed(request)

        def attempt(left: float) -> Stream:
            call = self._stub.Generate(request, timeout=left, metadata=self._metadata)
            return Stream(call, next(call, None), ChunkReader(request))

        return self._retrying(attempt, timeout)

    def _retrying(self, attempt: Callable[[float], T], timeout: float | None) -> T:
        """Retry ``attempt``, which receives the seconds that are left."""
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        for failures in itertools.count():
            try:
                result = attempt(deadline - time.monotonic())
            except grpc.RpcError as failed:
                error = _translated(failed)
                wait = self._retries.wait(error, failures, deadline - time.monotonic())
                if wait is None:
                    raise error from failed
                time.sleep(wait)
            else:
                self._retries.succeeded()
                return result
        raise AssertionError("count ended")


def _translated(error: grpc.RpcError) -> errors.TokenloomError:
    return errors.from_rpc(cast(grpc.Call, error))  # as every error of a call is

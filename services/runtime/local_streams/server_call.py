"""One connection to a server of local streams: the call that it carries."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from tokenloom.request.errors import Internal, TokenloomError

from ..host.tasks import Tasks
from .connection import Connection
from .frames import Kind
from .inbox import Inbox
from .servicer_context import LocalContext, Requests, end

log = logging.getLogger(__name__)

FindHandler: TypeAlias = Callable[[str], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"]
"""The handler of a method, by its full name; None when there is none."""


class ServerCall:
    """From the connection's beginning to its end; a handler runs in between."""

    def __init__(
        self, find: FindHandler, tasks: Tasks, max_message_bytes: int, on_gone: Callable[["ServerCall"], None]
    ) -> None:
        """``tasks``: own the handler's. ``on_gone``: called when the connection is no more."""
        self._find = find
        self._tasks = tasks
        self._max_message_bytes = max_message_bytes
        self._on_gone = on_gone
        self.connection = Connection(self, max_message_bytes)
        self.gone = asyncio.Event()
        self.handler: asyncio.Task[None] | None = None
        self._inbox = Inbox(self.connection)

    def stop(self) -> None:
        """Ends the call, if it runs, as one whose server goes."""
        self._end(grpc.StatusCode.UNAVAILABLE, "the server is stopping")

    # As of connection.Receiver

    def on_connected(self) -> None:
        """The caller speaks first."""

    def on_frame(self, kind: Kind, payload: bytes) -> None:
        if self.connection.is_finished:
            return  # sent before the caller knew
        if kind is Kind.OPEN and self.handler is None:
            self.handler = self._tasks.spawn(self._serve(payload.decode(errors="replace")), name="local-stream")
        elif kind is Kind.MESSAGE and self.handler is not None:
            self._inbox.put(payload)
        elif kind is Kind.HALF_CLOSE and self.handler is not None:
            self._inbox.end()
        else:
            raise Internal(f"{kind.name} came out of turn")

    def on_broken(self, error: TokenloomError) -> None:
        self._end(error.code, error.message)

    def on_lost(self) -> None:
        if self.handler is not None:
            self.handler.cancel()
        self.gone.set()
        self._on_gone(self)

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        end(self.connection, code, details)
        self._inbox.drop()
        if self.handler is not None:
            self.handler.cancel()

    async def _serve(self, method: str) -> None:
        try:
            handler = await self._find(method)
            if handler is None or handler.stream_stream is None:
                end(self.connection, grpc.StatusCode.UNIMPLEMENTED, "there is no such stream here")
            else:
                await self._run(handler)
                end(self.connection, grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            pass  # its status is sent
        except asyncio.CancelledError:
            end(self.connection, grpc.StatusCode.CANCELLED, "the handler was cancelled")
            raise
        except Exception:
            log.exception("a handler's error got past the edge")
            end(self.connection, grpc.StatusCode.INTERNAL, "internal error")
        finally:
            self._inbox.drop()

    async def _run(self, handler: "grpc.RpcMethodHandler[Any, Any]") -> None:
        behaviour: Any = handler.stream_stream
        context = LocalContext(self.connection, handler.response_serializer or bytes, self._max_message_bytes)
        requests = Requests(self._inbox, handler.request_deserializer or bytes)
        if not inspect.isasyncgenfunction(behaviour):
            await behaviour(requests, context)
            return
        async with aclosing(behaviour(requests, context)) as responses:
            async for response in responses:
                await context.write(response)

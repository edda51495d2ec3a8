"""The servicer's edge: what a handler raises becomes a gRPC status, and nothing else leaves."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from tokenloom.request import errors

from ..telemetry.tracing import CURRENT, Tracer, pick_headers

log = logging.getLogger(__name__)

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

Authorize: TypeAlias = Callable[[grpc.HandlerCallDetails], None]
"""Raises ``TokenloomError`` for a call that may not come in."""

CheckCaller: TypeAlias = Callable[[str, _Context], None]
"""Raises ``TokenloomError`` for a method, by its full name, that the peer of this context may not call."""

OPEN_SERVICE = "/grpc.health.v1.Health/"
"""What answers whoever asks: probes have no credentials."""


class Edge(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raised with the error's status; while ``is_ready`` is false, answers UNAVAILABLE for
    services that are not there yet. Handlers just raise ``TokenloomError``.

    Attributes:
        authorize: Asked before every call but health's; None lets all in.
    """

    def __init__(
        self, is_ready: Callable[[], bool], check_caller: CheckCaller | None = None, tracer: Tracer | None = None
    ) -> None:
        """``check_caller``: None where peers have no certificates. ``tracer``: of unary calls that carry a trace."""
        self._tracer = tracer
        self._is_ready = is_ready
        self._check_caller = check_caller
        self._guarded: dict[str, tuple[_Handler, _Handler]] = {}  # by method: as many as there are
        self.authorize: Authorize | None = None

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler:
        method = handler_call_details.method
        is_open = method.startswith(OPEN_SERVICE)
        if self.authorize is not None and not is_open:
            try:
                self.authorize(handler_call_details)
            except errors.TokenloomError as error:
                return _refusing(error)
        handler = await continuation(handler_call_details)
        if self._tracer is not None and handler is not None and handler.unary_unary is not None:
            handler = _traced(handler, method, self._tracer)
        if handler is not None:
            return self._guard(method, handler, is_open=is_open)
        if not self._is_ready():
            return _refusing(errors.Unavailable("this part is still starting"))
        return None  # gRPC's own UNIMPLEMENTED

    def _guard(self, method: str, handler: "grpc.RpcMethodHandler[Any, Any]", *, is_open: bool) -> _Handler:
        """Once for all calls of a method."""
        known, guarded = self._guarded.get(method, (None, None))
        if known is not handler:
            admit = partial(self._check_caller, method) if self._check_caller and not is_open else _all
            guarded = _guarded(handler, admit)
            self._guarded[method] = handler, guarded
        return guarded


def _traced(handler: "grpc.RpcMethodHandler[Any, Any]", method: str, tracer: Tracer) -> _Handler:
    """Makes a span of the call when the caller is making one."""
    behaviour: Any = handler.unary_unary

    async def call(request: object, context: _Context) -> object:
        headers = pick_headers(context.invocation_metadata() or ())
        span = tracer.start(method.lstrip("/"), headers, kind="server") if headers else None
        if span is None:
            return await behaviour(request, context)
        CURRENT.set(span.headers)  # of this call only: gRPC runs each in a task of its own
        log.debug("%s", method)
        error = "cancelled"
        try:
            response = await behaviour(request, context)
            error = ""
            return response
        except Exception as raised:
            error = errors.of_exception(raised).message
            raise
        finally:
            span.end({"rpc.system": "grpc"}, error)

    return grpc.unary_unary_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


def _refusing(error: errors.TokenloomError) -> _Handler:
    """Fits every kind of call: it ends before a message is read or written."""

    async def refuse(_: object, context: _Context) -> None:
        await errors.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _all(context: _Context) -> None:
    """Lets everybody in."""


def _guarded(
    handler: "grpc.RpcMethodHandler[Any, Any]", admit: Callable[[_Context], None]
) -> "grpc.RpcMethodHandler[Any, Any]":
    wrap = _guarded_stream if handler.response_streaming else _guarded_unary
    if handler.request_streaming and handler.response_streaming:
        make, behaviour = grpc.stream_stream_rpc_method_handler, handler.stream_stream
    elif handler.request_streaming:
        make, behaviour = grpc.stream_unary_rpc_method_handler, handler.stream_unary
    elif handler.response_streaming:
        make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
    else:
        make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
    return make(wrap(behaviour, admit), _lenient(handler.request_deserializer), handler.response_serializer)


_UNDECODABLE = object()
"""Stands for a message that is none, until :func:`_decoded` refuses it."""


def _lenient(deserialize: Any) -> Any:
    """A failing deserializer would be answered by gRPC itself: with its words, and with a traceback in the log."""

    def call(data: bytes) -> object:
        try:
            return deserialize(data)
        except DecodeError:
            return _UNDECODABLE

    return call


def _decoded(request: Any) -> Any:
    """A message, once it is known to be one, or a stream of such messages."""
    if isinstance(request, Message):  # asked for what it lacks, it makes an exception of it each time
        return request
    if request is _UNDECODABLE:
        raise errors.InvalidArgument("the message is not of the call's type, or damaged")
    return _DecodedStream(request) if hasattr(request, "__aiter__") else request


class _DecodedStream:
    """Raises at a message that is none."""

    def __init__(self, requests: AsyncIterator[object]) -> None:
        self._requests = requests

    def __aiter__(self) -> "_DecodedStream":
        return self

    async def __anext__(self) -> object:
        return _decoded(await anext(self._requests))


def _guarded_unary(behaviour: Any, admit: Callable[[_Context], None]) -> Any:
    async def call(request: object, context: _Context) -> object:
        try:
            admit(context)
            return await behaviour(_decoded(request), context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await errors.abort(context, error)

    return call


def _guarded_stream(behaviour: Any, admit: Callable[[_Context], None]) -> Any:
    if not inspect.isasyncgenfunction(behaviour):
        return _guarded_unary(behaviour, admit)  # writes to the context itself

    async def call(request: object, context: _Context) -> AsyncIterator[object]:
        try:
            admit(context)
            async with aclosing(behaviour(_decoded(request), context)) as responses:
                async for response in responses:
                    yield response
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await errors.abort(context, error)

    return call

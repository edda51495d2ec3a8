"""Guards the servicers: admits calls, decodes requests, traces, and turns errors into gRPC statuses.

It also bounds how long clients from outside the mesh keep calls open that say nothing: a server has a limit of open
calls. A method whose requests are a stream bounds its clients' silence itself, because it knows how long a session may
wait.
"""

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from tokenloom.request import errors, wire_errors
from tokenloom.request.limits import AdmissionLimit, Reservation

from ..local_streams.server import ServerCall, damaged_request
from ..telemetry.tracing import CURRENT, Tracer, pick_headers

log = logging.getLogger(__name__)

_Servicer = TypeVar("_Servicer")
_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Admit: TypeAlias = Callable[[_Context], None]

Authorize: TypeAlias = Callable[[grpc.HandlerCallDetails], None]
"""Raises ``TokenloomError`` for a call that is not admitted."""

ObserveEnd: TypeAlias = Callable[[errors.TokenloomError | None], None]
"""Called once at the end of a call, with the error that ended it."""

ObserveCall: TypeAlias = Callable[[str], ObserveEnd]
"""Called in the task of each call, with the method's full name, or ``OTHER`` if no servicer has the method."""

OTHER = "other"
"""Stands for methods that no servicer has: their number must not depend on clients."""

CheckCaller: TypeAlias = Callable[[str, _Context], None]
"""Raises ``TokenloomError`` when the peer of this context may not call the method of this full name."""

OPEN_SERVICE = "/grpc.health.v1.Health/"
"""Answers every caller: probes have no credentials."""

_MAKERS: dict[tuple[bool, bool], Callable[..., _Handler]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether requests and responses are streams."""

MESSAGE_SECONDS = 60.0
"""Limit on the time from the beginning of a call to the end of its only message, as for the body of an HTTP request."""
WATCH = "/grpc.health.v1.Health/Watch"
"""Stays open as long as its caller likes, who needs no credentials."""
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
"""Its requests are a stream, and it is a library's."""
_WATCH_SHARE = 4


class Edge(grpc.GenericRpcHandler):
    """Holds the servicers of a process and finds the handler of a call, for gRPC and for local streams. Handlers only
    raise ``TokenloomError``: the edge ends the call with that error's status.

    Attributes:
        services: Full names of the services added so far.
        authorize: Called before every call except health checks; None admits all calls.
        observe: Observes every call except health checks; set before servicers are added. None: calls are not observed.
        is_ready: While false, calls to services that have not been added yet fail with UNAVAILABLE.
        ends: Holds back the ends of calls for a moment before the server stops.
    """

    def __init__(
        self,
        check_caller: CheckCaller | None = None,
        tracer: Tracer | None = None,
        outside: "OutsideCalls | None" = None,
    ) -> None:
        """``check_caller``: None where peers have no certificates. ``tracer``: traces unary calls that carry a trace;
        None: no tracing. ``outside``: guards the calls of clients from outside the mesh; None: it has none."""
        self.services: list[str] = []
        self.authorize: Authorize | None = None
        self.observe: ObserveCall | None = None
        self.is_ready = False
        self.ends = CallEnds()
        self._check_caller = check_caller
        self._tracer = tracer
        self._outside = outside
        self._handlers: dict[str, _Handler] = {}  # by full method name

    def add_servicer(self, add: Callable[[_Servicer, Any], None], servicer: _Servicer) -> None:
        """Add a servicer, also while the server runs. ``add``: the generated ``add_…Servicer_to_server``."""
        add(servicer, self)

    def add_registered_method_handlers(self, service: str, handlers: dict[str, _Handler]) -> None:
        """Called by generated code. ``handlers`` maps method names without the service. Raises ``ValueError`` if the
        service is there."""
        if service in self.services:
            raise ValueError(f"the gRPC service {service} is there already")
        self.services.append(service)
        for name, handler in handlers.items():
            method = f"/{service}/{name}"
            # Guarded once, when it is added. An interceptor of gRPC ran for every call and wrapped it four deep: a
            # unary call passed 6 Python calls, now 2.
            self._handlers[method] = self._guard(method, handler)

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Do nothing: generated code passes the same handlers by name too."""

    def service(self, call: grpc.HandlerCallDetails) -> "_Handler | None":
        """Return the handler of a call; None makes gRPC answer UNIMPLEMENTED."""
        if self.authorize is not None and not call.method.startswith(OPEN_SERVICE):
            try:
                self.authorize(call)
            except Exception as error:  # gRPC would answer others itself, with their texts
                return self._refusing(call.method, wire_errors.of_exception(error))
        handler = self._handlers.get(call.method)
        if handler is None and not self.is_ready:
            return self._refusing(call.method, errors.Unavailable("The service is still starting; retry."))
        if handler is None and self.observe is not None:
            self.observe(OTHER)(errors.Unimplemented(""))
        return handler

    def _refusing(self, method: str, error: errors.TokenloomError) -> _Handler:
        """Return a handler for every kind of call: it ends before a message is read or written."""
        observe, name = self.observe, method if method in self._handlers else OTHER

        async def refuse(_: object, context: _Context) -> None:
            if observe is not None:
                observe(name)(error)
            await wire_errors.abort(context, error)

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _guard(self, method: str, handler: _Handler) -> _Handler:
        checks_caller = self._check_caller is not None and not method.startswith(OPEN_SERVICE)
        admit = partial(self._check_caller, method) if self._check_caller and checks_caller else None
        behaviour: Any = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        if inspect.isasyncgenfunction(behaviour):
            behaviour = writing(behaviour)
        if self._tracer is not None and handler.unary_unary is not None:
            behaviour = _traced(behaviour, method, self._tracer)
        # gRPC answers a failing deserializer itself, with its own text and a traceback in the log: the guard decodes.
        decode: Any = handler.request_deserializer or bytes
        if handler.request_streaming:
            decode = partial(_decoded, decode)
        waits = self._outside is not None and not handler.request_streaming
        if self._outside is not None:
            behaviour = self._outside.guard(method, behaviour)
        make = _MAKERS[handler.request_streaming or waits, handler.response_streaming]
        observe = None if self.observe is None or method.startswith(OPEN_SERVICE) else partial(self.observe, method)
        call = _guarded(behaviour, decode, admit, observe, self.ends, waits=waits)
        return make(call, None, handler.response_serializer)


def _guarded(
    behaviour: Any,
    decode: Callable[[Any], Any],
    admit: _Admit | None,
    observe: Callable[[], ObserveEnd] | None,
    ends: "CallEnds",
    *,
    waits: bool,
) -> Any:
    """Return the handler. ``waits``: the request is a stream of one message, which is still to come."""

    async def call(request: Any, context: _Context) -> object:
        observe_end = None if observe is None else observe()
        try:
            if admit is not None:
                admit(context)
            if waits:
                request = await only_message(aiter(request))
            try:
                request = decode(request)
            except DecodeError:
                raise damaged_request() from None
            response = await behaviour(request, context)
            if observe_end is not None:
                observe_end(None)
            if ends.are_held:
                await ends.wait()
            return response
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if observe_end is not None:
                observe_end(errors.Cancelled(""))
            raise
        except Exception as error:
            return await _abort(context, ends.error_of(error), observe_end, ends)

    return call


async def _abort(
    context: _Context, error: errors.TokenloomError, observe_end: ObserveEnd | None, ends: "CallEnds"
) -> NoReturn:
    """End a call with an error. A function of its own: a name for the error in the frame that has caught it would keep
    both alive until the garbage collector runs."""
    if observe_end is not None:
        observe_end(error)
    if ends.are_held:
        await ends.wait()
    await wire_errors.abort(context, error)


class CallEnds:
    """Holds back the ends of calls, so that a client learns that the server leaves before it makes its next call.

    A server that stops sends GOAWAY, and cancels the calls that were on their way to it at that moment. A client that
    waits for an answer makes no call, so the answers wait until GOAWAY has been sent.

    Attributes:
        are_held: Whether :meth:`wait` waits.
        is_stopping: Whether the service gives up what its calls need.
    """

    def __init__(self) -> None:
        self.are_held = False
        self.is_stopping = False
        self._released = asyncio.Event()

    def hold(self) -> None:
        self.are_held = True

    def release(self) -> None:
        self.are_held = False
        self._released.set()

    async def wait(self) -> None:
        """Wait until :meth:`release`."""
        await self._released.wait()

    def error_of(self, error: Exception) -> errors.TokenloomError:
        """Return what the caller sees of an error. While the service stops, one that is not ours is due to that."""
        # Two of 386 requests got 500 while their tokenizer was terminated: its threads were gone.
        if self.is_stopping and not isinstance(error, (errors.TokenloomError, grpc.aio.AioRpcError)):
            log.info("a call was ended by the stop", exc_info=error)
            return errors.TryElsewhere("The service is shutting down; retry.")
        return wire_errors.of_exception(error)


def writing(behaviour: Any) -> Any:
    """Make a handler that yields its responses one that writes them to its context."""

    async def call(request: Any, context: _Context) -> None:
        async with aclosing(behaviour(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return call


def _decoded(decode: Callable[[bytes], object], requests: Any) -> Any:
    """Return the requests of a stream, decoded."""
    return requests.decode_with(decode) if isinstance(requests, ServerCall) else _Messages(decode, requests)


class _Messages:
    """Decodes a stream of requests that gRPC reads."""

    def __init__(self, decode: Callable[[bytes], object], requests: Any) -> None:
        self._decode = decode
        self._requests = requests

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self) -> object:
        try:
            return self._decode(await anext(self._requests))
        except DecodeError:
            raise damaged_request() from None


def _traced(behaviour: Any, method: str, tracer: Tracer) -> Any:
    """Wrap a unary handler: make a span of each call whose caller sends a trace."""

    async def call(request: object, context: _Context) -> object:
        headers = pick_headers(context.invocation_metadata() or ())
        span = tracer.start(method.lstrip("/"), headers, kind="server") if headers else None
        if span is None:
            return await behaviour(request, context)
        CURRENT.set(span.headers)  # for this call only: gRPC runs each in a task of its own
        log.debug("%s", method)
        error = "cancelled"
        try:
            response = await behaviour(request, context)
            error = ""
            return response
        except Exception as raised:
            error = wire_errors.of_exception(raised).message
            raise
        finally:
            span.end({"rpc.system": "grpc"}, error)

    return call


async def only_message(requests: AsyncIterator[Any]) -> Any:
    """Return the message of a call that has one. gRPC itself would wait for it without a limit.

    Raises ``DeadlineExceeded`` when it does not arrive, ``InvalidArgument`` when there is none.
    """
    try:
        async with asyncio.timeout(MESSAGE_SECONDS):
            return await anext(requests)
    except StopAsyncIteration:
        raise errors.InvalidArgument("the call has ended without a message") from None
    except TimeoutError:
        raise errors.DeadlineExceeded(f"the call's message did not arrive within {MESSAGE_SECONDS:g} s") from None


class OutsideCalls:
    """Guards the methods of a public service."""

    def __init__(self, max_calls: int) -> None:
        """``max_calls``: that the server may have open."""
        # Watch needs no key and never ends by itself. A quarter of the calls keeps any client from filling the server
        # with it.
        self._watches = AdmissionLimit(max(max_calls // _WATCH_SHARE, 1))

    def guard(self, method: str, behaviour: Any) -> Any:
        """Return the handler of a method with its guard, if it needs one."""
        if method == WATCH:
            return self._watching(behaviour)
        return _impatient(behaviour) if method == REFLECTION else behaviour

    def _watching(self, behaviour: Any) -> Any:
        async def watch(request: object, context: object) -> object:
            with self.take_watch():
                return await behaviour(request, context)

        return watch

    def take_watch(self) -> Reservation:
        """Take the place of a call that watches the health. Raises ``ResourceExhausted``."""
        if (place := self._watches.take(1)) is None:
            message = f"{self._watches.size} calls watch the health already; use Check"
            raise errors.ResourceExhausted(message, retry_after=MESSAGE_SECONDS)
        return place


def not_arrived() -> errors.TokenloomError:
    """Return the error of a call whose client sends nothing for :data:`MESSAGE_SECONDS`."""
    return errors.DeadlineExceeded(f"no request arrived within {MESSAGE_SECONDS:g} s")


class Impatient:
    """Ends a stream of requests that do not follow each other."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = aiter(requests)

    def __aiter__(self) -> "Impatient":
        return self

    async def __anext__(self) -> Any:
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                return await anext(self._requests)
        except TimeoutError:
            raise not_arrived() from None


def _impatient(behaviour: Any) -> Any:
    async def call(requests: AsyncIterator[Any], context: object) -> object:
        return await behaviour(Impatient(requests), context)

    return call

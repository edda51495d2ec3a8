"""Ends the connections of clients in a process that outlives gateways: HTTP/2 of gRPC, and TLS.

What encrypts a connection, and the state of HTTP/2, are in the process that made it, and are lost with it. A relay has
nothing else to lose. It continues answers of gRPC at another gateway by their positions, as our own clients do.
The bytes of HTTP it only decrypts: the connection behind it is one that gateways hold (``--hold-connections``).
"""

import asyncio
import contextlib
import logging
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import grpc.aio

from tokenloom.process import unix_socket
from tokenloom.request import errors, wire_errors
from tokenloom.request.limits import MAX_MESSAGE_BYTES
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

from .answer_course import IDEMPOTENCY_KEY, AnswerCourse, NextCall, Retries
from .async_calls import CLOSE_SECONDS, AsyncCancellations, Call, CallError, details_of, open_channel, was_cut
from .async_client import AsyncResponses
from .connection import Gateways, Metadata

log = logging.getLogger(__name__)

_SERVICE = f"/{inference_pb2.DESCRIPTOR.services_by_name['Inference'].full_name}/"
_REPEATED = frozenset(_SERVICE + name for name in ("Embed", "Classify", "Score", "Pool", "ListModels"))
"""Calls of one message that change nothing: they are made again where a gateway is lost before it has answered."""
_MOST_TRIES = 8
"""Further calls at gateways that are lost; the pauses between them grow to 10 s, so that a gateway may start anew."""
_MOST_CALLS = 1024
"""Of all clients at the same time: so many a gateway allows on one connection, and a relay has one to each. Further
calls would wait in this process, unseen; they end in RESOURCE_EXHAUSTED."""
_WAIT_SECONDS = 0.5
_LONGEST_SECONDS = 86_400.0
"""Stands for the deadline of a call without one; gateways have a limit of their own."""
_NOT_PASSED = ("user-agent", "te", "content-type")
_CONNECT_SECONDS = 30.0
"""For so long a client of HTTP waits until a gateway accepts its connection: for as long as connections are held."""
_TRY_SECONDS = 5.0
"""Limit on one attempt to connect: a machine that is gone refuses nothing, and the next gateway would not be tried."""
_HANDSHAKE_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_NOTE_SECONDS = 10.0
_GRACE_SECONDS = 10.0
_QUIET_SECONDS = 1.0
"""A connection of HTTP whose gateway has said the last word, so long ago, has no answer that is being written."""


class _Gateway(NamedTuple):
    channel: grpc.aio.Channel
    stub: Any


class GrpcRelay(grpc.GenericRpcHandler):
    """Passes the calls of gRPC's clients on to gateways.

    Attributes:
        num_continued: Answers that were continued, and calls that were made again, because a gateway was lost.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        """``addresses``: of gateways, ``host:port``, ``dns:///name:port`` or ``unix:/path``, at least one. Call it in
        the event loop."""
        channels = {address: open_channel(address, None) for address in addresses}
        stubs = {
            address: _Gateway(channel, inference_pb2_grpc.InferenceStub(channel))
            for address, channel in channels.items()
        }
        self._gateways = Gateways[_Gateway](stubs)
        self._channels = list(channels.values())
        # Nothing that a gateway has answered is tried again: that is for the client to decide.
        self._retries = Retries(_MOST_TRIES, budget=1.0)
        self._cancellations = AsyncCancellations()
        self.num_continued = 0
        self._noted_at = -_NOTE_SECONDS

    def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        """Return what handles a call; gateways know which methods there are."""
        method = handler_call_details.method
        metadata = dict(handler_call_details.invocation_metadata or ())
        if method == _SERVICE + "Generate" and IDEMPOTENCY_KEY not in metadata:
            return grpc.unary_stream_rpc_method_handler(
                self._generate,
                inference_pb2.GenerateRequest.FromString,
                inference_pb2.GenerateResponse.SerializeToString,
            )
        return grpc.stream_stream_rpc_method_handler(partial(self._pass, method))

    async def close(self) -> None:
        """End the connections to gateways."""
        await self._cancellations.close()
        for channel in self._channels:
            await channel.close()

    async def _generate(
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Answer over as many calls as it takes."""
        metadata, left = _passed(context), context.time_remaining()
        deadline = time.monotonic() + (_LONGEST_SECONDS if left is None else left)
        calls: list[Call] = []

        def open_call(call: NextCall, seconds: float, gateway: _Gateway) -> Call:
            is_new = isinstance(call.request, inference_pb2.GenerateRequest)
            method = gateway.stub.Generate if is_new else gateway.stub.Resume
            if calls:
                self._note_further()
            calls[:] = [method(call.request, timeout=seconds, metadata=(*metadata, *call.metadata))]
            return calls[0]

        course = AnswerCourse(request, self._retries, deadline, time.monotonic, may_restart=False)
        self._cancellations.prepare()
        responses = AsyncResponses(course, self._gateways, open_call, partial(self._cancel, metadata))
        try:
            async for response in responses:
                if course.is_first:
                    await context.send_initial_metadata(tuple(await calls[0].initial_metadata() or ()))
                yield response
            context.set_trailing_metadata(tuple(await calls[0].trailing_metadata() or ()))
        except errors.TokenloomError as error:
            await _abort(context, error)
        finally:
            responses.close()  # also where the client has left

    def _cancel(self, metadata: Metadata, request: inference_pb2.InferenceCancelRequest) -> None:
        cancel = self._gateways.current.stub.Cancel
        self._cancellations.add(partial(cancel, request, timeout=CLOSE_SECONDS, metadata=metadata))

    async def _pass(self, method: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Pass the messages of a call on in both directions, as they are."""
        metadata = _passed(context)
        first, is_repeated = await _first(requests), method in _REPEATED
        has_begun, has_reached, tries = False, False, 0
        while True:
            gateway = self._gateways.current
            opened: Any = gateway.channel.stream_stream(method)
            sent = first if is_repeated else _joined(first, requests)
            call = opened(sent, timeout=context.time_remaining(), metadata=metadata)
            try:
                await call.wait_for_connection()
                has_reached = True
                async for message in call:
                    if not has_begun:
                        has_begun = self._gateways.have_answered = True
                        await context.send_initial_metadata(tuple(await call.initial_metadata() or ()))
                    yield message
                context.set_trailing_metadata(tuple(await call.trailing_metadata() or ()))
                return
            except CallError as failed:
                # A call with which no gateway was reached has had no effect.
                is_final = has_begun or (has_reached and not is_repeated) or tries == _MOST_TRIES
                if not was_cut(failed) or not self._tries_another(gateway, failed) or is_final:
                    await _abort_as(context, failed)
            finally:
                call.cancel()
            await asyncio.sleep(_WAIT_SECONDS * tries)
            tries += 1
            self._note_further()

    def _note_further(self) -> None:
        """Count one more call in the place of one that was lost, and log it now and then: no other log reports it."""
        self.num_continued += 1
        if (now := time.monotonic()) - self._noted_at >= _NOTE_SECONDS:
            self._noted_at = now
            log.warning("a gateway was lost; answers continued and calls made again until now: %d", self.num_continued)

    def _tries_another(self, gateway: _Gateway, failed: CallError) -> bool:
        """Leave a gateway that is lost. Return whether there may be another one."""
        try:
            self._gateways.try_another(gateway, details_of(failed))
        except errors.Unavailable:
            return False
        return True


async def _first(requests: AsyncIterator[bytes]) -> list[bytes]:
    """Return the first message of a call, and no more than that: it is kept while gateways are tried."""
    async for message in requests:
        return [message]
    return []


async def _joined(first: list[bytes], requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the messages of a call. gRPC asks for the second one once it has sent the first: no call that has reached
    no gateway has taken one from the next call."""
    for message in first:
        yield message
    async for message in requests:
        yield message


def _passed(context: Any) -> Metadata:
    """Return the metadata of a client's call that is not of its own connection."""
    given = context.invocation_metadata() or ()
    return tuple((key, value) for key, value in given if key not in _NOT_PASSED and not key.startswith("grpc-"))


async def _abort(context: Any, error: errors.TokenloomError) -> None:
    """End a call with the status that a gateway gave."""
    failed = error.__cause__
    if isinstance(failed, CallError):
        await _abort_as(context, failed)
    await wire_errors.abort(context, error)


async def _abort_as(context: Any, failed: CallError) -> None:
    if was_cut(failed):  # its text has addresses of the mesh; clients that resume by themselves know it by its code
        await context.abort(grpc.StatusCode.UNAVAILABLE, "The connection to the gateway was lost; retry.")
    await context.abort(failed.code(), details_of(failed), tuple(failed.trailing_metadata() or ()))


async def serve_grpc(
    relay: GrpcRelay,
    listen: str,
    credentials: grpc.ServerCredentials | None = None,
    options: Sequence[tuple[str, int]] = (),
) -> grpc.aio.Server:
    """Return a server that has begun to serve. ``credentials``: None: plain text. ``options``: of gRPC. Raises
    ``Unavailable`` where it cannot listen."""
    options = [*options, ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MOST_CALLS)
    server.add_generic_rpc_handlers((relay,))
    path = listen.removeprefix("unix:") if listen.startswith("unix:") else ""
    try:
        # gRPC itself would take the path of a unix socket from a process that listens there, and remove it at its end.
        with unix_socket.claimed(path) if path else contextlib.nullcontext():
            if credentials is None:
                server.add_insecure_port(listen)
            else:
                server.add_secure_port(listen, credentials)
    except (RuntimeError, OSError) as error:
        raise errors.Unavailable(f"cannot listen at {listen}: {error}") from None
    await server.start()
    return server


class _End(asyncio.Protocol):
    """One of two connections, each of which gets the bytes that the other one reads.

    Attributes:
        other: The other one; None: it is not made yet, or has ended.
        read_at: When the last bytes were read, in the event loop's time; 0: none were.
    """

    def __init__(self) -> None:
        self.other: _End | None = None
        self.transport: asyncio.Transport | None = None
        self.read_at = 0.0
        self._time = asyncio.get_running_loop().time

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.read_at = self._time()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self.other.transport.resume_reading()

    def eof_received(self) -> bool:
        ends = self.transport, None if self.other is None else self.other.transport
        if not all(each is not None and each.can_write_eof() for each in ends):  # TLS ends in both directions at once
            return False
        cast(asyncio.Transport, ends[1]).write_eof()
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        other, self.other = self.other, None
        if other is not None:
            other.other = None
            if other.transport is not None:
                other.transport.close()  # once what was written has left


class HttpRelay:
    """Decrypts the connections of HTTP's clients, each of which gets one to a gateway."""

    def __init__(
        self, addresses: Sequence[tuple[str, int]], context: ssl.SSLContext | None, max_connections: int = 4096
    ) -> None:
        """``addresses``: host and port of gateways, at least one. ``context``: None: the clients send plain text.
        ``max_connections``: of clients; further ones are closed."""
        self._addresses = list(addresses)
        self._context = context
        self._max_connections = max_connections
        self._turn = 0
        self._tasks: set[asyncio.Task[None]] = set()  # one for each connection that waits for a gateway
        self._clients: set[_ClientEnd] = set()

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Return a server that has begun to serve. Raises ``OSError``."""
        limit = None if self._context is None else _HANDSHAKE_SECONDS
        return await asyncio.get_running_loop().create_server(
            lambda: _ClientEnd(self._begin, self._clients), host, port, ssl=self._context, ssl_handshake_timeout=limit
        )

    async def drain(self, seconds: float) -> None:
        """Return once no client waits for a part of an answer, as far as can be seen of bytes, or after some seconds.
        To be called when no further connection is accepted."""
        until = asyncio.get_running_loop().time() + seconds
        while (now := asyncio.get_running_loop().time()) < until:
            if all(client.is_quiet(now) for client in self._clients):
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def _begin(self, client: _End) -> None:
        if len(self._clients) > self._max_connections:
            cast(asyncio.Transport, client.transport).abort()
            return
        task = asyncio.get_running_loop().create_task(self._connect(client), name="connect to a gateway")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: _End) -> None:
        loop, transport = asyncio.get_running_loop(), client.transport
        assert transport is not None
        until = loop.time() + _CONNECT_SECONDS
        for address in self._turns():
            if transport.is_closing():
                return
            try:
                async with asyncio.timeout(_TRY_SECONDS):
                    _, gateway = await loop.create_connection(_End, *address)
            except (OSError, UnicodeError) as error:  # the latter from a name that is none
                if loop.time() > until:
                    log.warning("cannot connect to a gateway: %s", error)
                    transport.abort()
                    return
                await asyncio.sleep(_LOOK_SECONDS)
                continue
            gateway.other, client.other = client, gateway
            if transport.is_closing():  # it has left meanwhile
                assert gateway.transport is not None
                gateway.transport.close()
            else:
                transport.resume_reading()
            return

    def _turns(self) -> Iterator[tuple[str, int]]:
        """Yield the gateways in turn, again and again."""
        while True:
            self._turn += 1
            yield self._addresses[self._turn % len(self._addresses)]


class _ClientEnd(_End):
    """The connection of a client, which is read once there is one to a gateway."""

    def __init__(self, begin: Callable[["_ClientEnd"], object], live: set["_ClientEnd"]) -> None:
        """``live``: has it while it is connected."""
        super().__init__()
        self._begin = begin
        self._live = live

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast(asyncio.Transport, transport).pause_reading()
        self._live.add(self)
        self._begin(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._live.discard(self)
        super().connection_lost(exc)

    def is_quiet(self, now: float) -> bool:
        """Return whether the client has, as far as can be seen, all that it has asked for. ``now``: of the event
        loop."""
        if self.transport is None or self.transport.get_write_buffer_size():
            return False
        heard_at = 0.0 if self.other is None else self.other.read_at
        return self.read_at <= heard_at and now - heard_at > _QUIET_SECONDS


def run_relays(
    of_grpc: tuple[str, Sequence[str], Sequence[tuple[str, int]]],
    of_http: tuple[tuple[str, int], Sequence[tuple[str, int]]],
    credentials: grpc.ServerCredentials | None,
    context: ssl.SSLContext | None,
    on_ready: Callable[[], object],
    max_connections: int,
) -> None:
    """Relay until SIGINT or SIGTERM, and a few seconds more for calls and answers that end by themselves.

    Args:
        of_grpc: Where to listen, the addresses of gateways, and options of the server; empty: no calls of gRPC are
            relayed.
        of_http: Where to listen, and the gateways, as hosts and ports; without gateways HTTP is not relayed.
        credentials, context: Of the certificate; None: clients of gRPC send plain text.
        on_ready: Called once it listens.
        max_connections: Of clients of HTTP.

    Raises ``Unavailable`` and ``OSError`` where it cannot listen.
    """
    asyncio.run(_run(of_grpc, of_http, credentials, context, on_ready, max_connections))


async def _run(
    of_grpc: tuple[str, Sequence[str], Sequence[tuple[str, int]]],
    of_http: tuple[tuple[str, int], Sequence[tuple[str, int]]],
    credentials: grpc.ServerCredentials | None,
    context: ssl.SSLContext | None,
    on_ready: Callable[[], object],
    max_connections: int,
) -> None:
    ends = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ends.set)
    stops: list[Callable[[float], Awaitable[object]]] = []
    async with contextlib.AsyncExitStack() as opened:
        if of_grpc[0]:
            relay = GrpcRelay(of_grpc[1])
            opened.push_async_callback(relay.close)
            server = await serve_grpc(relay, of_grpc[0], credentials, of_grpc[2])
            opened.push_async_callback(server.stop, None)
            stops.append(server.stop)
        if of_http[1]:
            http = HttpRelay(of_http[1], context, max_connections)
            listener = opened.enter_context(contextlib.closing(await http.serve(*of_http[0])))
            stops.append(partial(_drain, http, listener))
        on_ready()
        await ends.wait()
        await asyncio.gather(*(stop(_GRACE_SECONDS) for stop in stops))


async def _drain(http: HttpRelay, listener: asyncio.Server, seconds: float) -> None:
    listener.close()
    await http.drain(seconds)

"""Runs a relay as a service: listens for clients, and shows what became of their calls and connections."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc.aio
from prometheus_client import CollectorRegistry, Gauge

from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime import addresses
from tokenloom.services.runtime.host.held_port import HeldPort, adopt
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.listener import bind, server_options
from tokenloom.services.runtime.telemetry.fast_metrics import Counter

from .grpc_relay import MOST_CALLS, GrpcRelay
from .http_relay import HttpRelay
from .relay_settings import RelaySettings

_REMEDY = "give --public-tls-cert"


class RelayService:
    """Stands before gateways."""

    def __init__(self, settings: RelaySettings, on_ready: Callable[[], object] = lambda: None) -> None:
        """``on_ready``: called once clients can connect."""
        self._settings = settings
        self._on_ready = on_ready
        self._undo = contextlib.AsyncExitStack()
        self._grpc: list[grpc.aio.Server | HeldPort] = []
        self._http: HttpRelay | None = None
        self._listener: asyncio.Server | None = None

    async def start(self, host: Host) -> None:
        """Listen for clients. Raises ``InvalidArgument`` for an address that other machines could reach in plain text,
        and ``Unavailable`` where it cannot listen."""
        if self._settings.grpc_listen:
            await self._start_grpc(host)
        if self._settings.https_listen:
            await self._start_http(host)
        self._on_ready()

    async def drain(self) -> None:
        """Accept no more, and return when calls have ended and connections have their answers."""
        seconds = self._settings.drain_timeout
        ends = [each.close(seconds) if isinstance(each, HeldPort) else each.stop(seconds) for each in self._grpc]
        if self._listener is not None:
            self._listener.close()
        await asyncio.gather(*ends, *(() if self._http is None else (self._http.drain(seconds),)))

    async def stop(self) -> None:
        await self._undo.aclose()

    async def _start_grpc(self, host: Host) -> None:
        settings = self._settings
        relay = GrpcRelay(settings.grpc_gateways, settings.max_body_bytes_in_flight)
        self._undo.push_async_callback(relay.close)
        observe_grpc(host.metrics, relay)
        options = server_options(settings.client_limits, settings.max_message_bytes)
        credentials = None if host.public_tls is None else host.public_tls.server_credentials()
        address = addresses.parse(settings.grpc_listen, field="grpc_listen")
        held = None
        if settings.grpc_listen_fd is not None:
            held = adopt(settings.grpc_listen_fd, address, field="grpc_listen_fd")
            options["grpc.so_reuseport"] = 1
        server = grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=MOST_CALLS)
        server.add_generic_rpc_handlers((relay,))
        bound = bind(server, str(address), credentials, insecure=settings.insecure, field="grpc_listen", remedy=_REMEDY)
        await server.start()
        self._grpc.append(server)
        self._undo.push_async_callback(server.stop, None)
        if held is not None:  # behind the server: from now on the kernel gives new connections to that
            waiting = HeldPort(held, relay, list(options.items()), MOST_CALLS, credentials)
            await waiting.open()
            self._grpc.append(waiting)
            self._undo.push_async_callback(waiting.close, 0)
        host.publish(address=bound)  # `tokenloom ps` shows where clients connect

    async def _start_http(self, host: Host) -> None:
        settings = self._settings
        address = addresses.parse(settings.https_listen, field="https_listen")
        gateways = [addresses.parse(each) for each in settings.http_gateways]
        assert host.public_tls is not None, "--https-listen needs a certificate"
        context = host.public_tls.server_context()
        ends, most_per_peer = [(each.host, each.port) for each in gateways], settings.max_client_connections_per_peer
        self._http = relay = HttpRelay(ends, context, settings.most_connections, most_per_peer)
        observe_http(host.metrics, relay)
        held = settings.https_listen_fd
        adopted = None if held is None else adopt(held, address, field="https_listen_fd")
        try:
            self._listener = await relay.serve(address.host, address.port, adopted)
        except OSError as error:
            raise Unavailable(f"https_listen: cannot bind {address}: {error.strerror}") from None
        self._undo.callback(relay.close)
        self._undo.callback(self._listener.close)
        port = self._listener.sockets[0].getsockname()[1]
        host.publish(http=str(addresses.Address(host=address.host, port=port)))


_PREFIX = "tokenloom_relay_"


def observe_grpc(registry: CollectorRegistry, relay: GrpcRelay) -> None:
    """Show what became of calls."""
    counts = (
        ("calls", "Calls of gRPC that clients have made.", lambda: relay.num_calls),
        ("continued", "Answers that were continued at another gateway, and calls that were made again there.",
         lambda: relay.num_continued),
        ("lost_calls", "Calls that ended because their gateway was lost.", lambda: relay.num_lost),
        ("call_request_bytes", "Bytes of messages from clients of gRPC.", lambda: relay.num_request_bytes),
        ("call_response_bytes", "Bytes of messages to clients of gRPC.", lambda: relay.num_response_bytes),
    )  # fmt: skip
    for name, text, read in counts:
        Counter(registry, _PREFIX + name, text, {}, read)
    gauge = Gauge(_PREFIX + "open_calls", "Calls of gRPC that are open.", registry=registry)
    gauge.set_function(lambda: relay.num_open)


def observe_http(registry: CollectorRegistry, relay: HttpRelay) -> None:
    """Show what became of connections."""
    text = "Connections of HTTPS that a gateway has reset, or ended before an answer, or that found no gateway."
    for name, about, read in (
        ("connections", "Connections of clients of HTTPS.", lambda: relay.num_accepted),
        ("broken_connections", text, lambda: relay.num_broken),
        ("connection_request_bytes", "Bytes from clients of HTTPS, decrypted.", lambda: relay.num_bytes[0]),
        ("connection_response_bytes", "Bytes to clients of HTTPS, before encryption.", lambda: relay.num_bytes[1]),
    ):
        Counter(registry, _PREFIX + name, about, {}, read)
    gauge = Gauge(_PREFIX + "open_connections", "Connections of clients of HTTPS that are open.", registry=registry)
    gauge.set_function(lambda: relay.num_connections)

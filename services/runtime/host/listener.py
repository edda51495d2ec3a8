"""Where a service listens: gRPC, and local streams for processes of the same host."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import grpc
import grpc.aio

from tokenloom.process import unix_socket
from tokenloom.request.errors import Unavailable
from tokenloom.request.limits import MAX_MESSAGE_BYTES

from .. import addresses
from ..local_streams.server import LocalServer
from ..local_streams.socket_end import path_beside
from ..peers.channels import KEEPALIVE_OPTIONS
from ..peers.tls import MeshTLS, PublicTLS
from .held_port import HeldPort, adopt
from .limits import GrpcLimits
from .service_settings import ServiceSettings
from .servicer_edge import Edge

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
    # The server asks its clients as well: otherwise it would keep the calls, and the requests, of one that vanished
    # without closing its connection.
    *KEEPALIVE_OPTIONS,
    # Without it our clients' pings end in GOAWAY too_many_pings, which kills every call.
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
]


def server_options(limits: GrpcLimits, max_message_bytes: int) -> dict[str, int]:
    """Return the options of a server, each with one value: of two, gRPC would take the first."""
    return {
        **dict(SERVER_OPTIONS),
        **dict(limits.options()),
        "grpc.max_receive_message_length": max_message_bytes,
    }


HOLD_SECONDS = 0.2
"""How long calls do not end before clients are asked to leave: the time in which a client that was just answered has
made its next call."""
_GOAWAY_SECONDS = 0.02
"""Time in which the server has asked its clients to leave, before the first call ends."""


class ServiceListener:
    """Passes the calls of both transports to one edge."""

    def __init__(self, settings: ServiceSettings, edge: Edge) -> None:
        self._settings = settings
        self._edge = edge
        self._calls = settings.grpc_limits.calls
        options = server_options(settings.grpc_limits, settings.max_message_bytes)
        self._options = list(options.items())
        # The supervisor holds the port with a socket of its own. The kernel gives connections to the second socket of
        # the group, this server's, and back to the supervisor's while there is none.
        if settings.held_listener is not None:
            options["grpc.so_reuseport"] = 1
        self._grpc = grpc.aio.server(options=list(options.items()), maximum_concurrent_rpcs=self._calls)
        self._grpc.add_generic_rpc_handlers((edge,))
        self._local: LocalServer | None = None
        self._held: HeldPort | None = None
        self._leaving: asyncio.Future[list[None]] | None = None
        self._bind_later: Callable[[], object] | None = None
        self._is_serving = False

    async def open(self, tls: MeshTLS | None, public_tls: PublicTLS | None) -> str:
        """Bind and serve; return the address of gRPC, ``host:port`` or ``unix:/path``. With an inherited socket,
        connections wait until :meth:`serve`.

        Args:
            tls: This process's certificate; None: the mesh has none.
            public_tls: The certificate of a public service for its clients; None: it serves plain text.

        Raises ``InvalidArgument`` for an address that other machines can reach in plain text, and for a descriptor
        that does not fit, ``Unavailable`` for an address that cannot be bound.
        """
        self._local = await self._serve_locally(tls)  # before gRPC: a peer that finds gRPC looks for this once
        held = self._settings.held_listener
        if held is None:
            bound = self._bind(tls, public_tls)
            await self._grpc.start()
            return bound
        address = addresses.parse(self._settings.listen, field="listen")
        adopted = adopt(held, address, field="listen_fd")
        credentials = public_tls.server_credentials() if public_tls is not None else None
        self._held = HeldPort(adopted, self._edge, self._options, self._calls, credentials)
        self._bind_later = partial(self._bind, tls, public_tls)
        return str(address)

    async def serve(self) -> None:
        """Accept the connections that wait in the inherited socket, and all new ones. Idempotent."""
        if self._held is not None and not self._is_serving:
            self._is_serving = True
            assert self._bind_later is not None
            self._bind_later()  # not before: from now on the kernel gives new connections to this socket
            await self._grpc.start()
            await self._held.open()

    async def leave(self, grace: float) -> None:
        """Accept no more connections, and ask clients to make their next calls elsewhere (GOAWAY).

        Calls in progress have ``grace`` seconds to end. Returns when the clients have been asked.
        """
        if self._held is not None:
            self._held.leave()
        # GOAWAY cancels the calls that are on their way to the server. Clients that call again after each answer lost
        # 28 of 10,284 calls in six restarts; with the answers held back until GOAWAY was sent they lost none of 10,864.
        self._edge.ends.hold()
        await asyncio.sleep(HOLD_SECONDS)
        self._leaving = asyncio.gather(
            self._grpc.stop(grace), *(() if self._held is None else (self._held.close(grace),))
        )
        await asyncio.sleep(_GOAWAY_SECONDS)
        self._edge.ends.release()

    async def close(self, grace: float) -> None:
        """End the calls that still run after ``grace`` seconds."""
        if self._local is not None:
            await self._local.close(grace)
        # Not in a coroutine of its own: gRPC crashes when an interpreter that ends by SystemExit leaves one suspended.
        await self._grpc.stop(grace)
        if self._held is not None:
            await self._held.close(grace)
        if self._leaving is not None:
            await self._leaving

    def _bind(self, tls: MeshTLS | None, public_tls: PublicTLS | None) -> str:
        settings = self._settings
        if settings.is_public:
            return bind(
                self._grpc,
                settings.listen,
                public_tls.server_credentials() if public_tls is not None else None,
                insecure=settings.is_open,
                remedy="give --public-tls-cert or an API key",
            )
        credentials = tls.server_credentials() if tls is not None else None
        return bind(self._grpc, settings.listen, credentials, insecure=settings.insecure)

    async def _serve_locally(self, tls: MeshTLS | None) -> LocalServer | None:
        """Serve local streams, unless peers need certificates or are clients from outside the mesh."""
        # Unix permissions decide who reaches a local stream, no certificate does; so a mesh with certificates uses gRPC
        # only.
        path = path_beside(self._settings.listen)
        if path is None or tls is not None or self._settings.is_public:
            return None
        server = LocalServer(path, self._edge.service, self._settings.max_message_bytes)
        try:
            await server.open()
        except OSError as error:
            raise Unavailable(f"listen: cannot bind {path}: {error.strerror}") from None
        return server


def bind(
    server: grpc.aio.Server,
    listen: str,
    credentials: grpc.ServerCredentials | None,
    *,
    insecure: bool,
    field: str = "listen",
    remedy: str = "give --tls-cert",
) -> str:
    """Add a port to a server and return its address. ``credentials`` None: plain text.

    Raises ``InvalidArgument`` for an address that other machines can reach in plain text, unless ``insecure`` allows
    it, ``Unavailable`` for one that cannot be bound.
    """
    address = addresses.parse(listen, field=field)
    try:
        # gRPC itself would take the path of a unix socket from a process that listens there.
        with unix_socket.claimed(address.path) if address.path else nullcontext():
            if credentials is not None:
                port = server.add_secure_port(str(address), credentials)
            else:
                addresses.check_closed(address, insecure=insecure, field=field, remedy=remedy)
                port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise Unavailable(f"{field}: cannot bind {address}; is it taken, or its folder missing?") from None
    except OSError as error:
        raise Unavailable(f"{field}: cannot bind {address}: {error.strerror}") from None
    return str(address) if address.path else str(addresses.Address(host=address.host, port=port))

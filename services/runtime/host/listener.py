"""Where a service listens: gRPC, and local streams for processes of the same host."""

from dataclasses import dataclass

import grpc
import grpc.aio

from tokenloom.request.errors import Unavailable

from ..local_streams import sockets
from ..local_streams.server import LocalServer
from ..peers import addresses
from ..peers.channels import KEEPALIVE_OPTIONS, MAX_MESSAGE_BYTES
from ..peers.tls import MeshTLS, PublicTLS
from .service_settings import ServiceSettings
from .servicer_edge import Edge

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # on by default: a second server would silently share the port
    *KEEPALIVE_OPTIONS,
    # Without it our clients' pings end in GOAWAY too_many_pings, which kills every call.
    ("grpc.http2.min_ping_interval_without_data_ms", 300),
]


class Listener:
    """Passes the calls of both transports to one edge."""

    def __init__(self, settings: ServiceSettings, edge: Edge) -> None:
        self._settings = settings
        self._edge = edge
        limits = settings.grpc_limits
        self._grpc = grpc.aio.server(
            options=[
                *SERVER_OPTIONS,
                *limits.options(),
                ("grpc.max_receive_message_length", settings.max_message_bytes),
            ],
            maximum_concurrent_rpcs=limits.calls,
        )
        self._grpc.add_generic_rpc_handlers((edge,))
        self._local: LocalServer | None = None

    async def open(self, tls: MeshTLS | None, public_tls: PublicTLS | None) -> str:
        """Bind and serve; return the address of gRPC, ``host:port`` or ``unix:/path``.

        Args:
            tls: This process's certificate; None: the mesh has none.
            public_tls: The certificate of a public service for its clients; None: it serves plain text.

        Raises ``InvalidArgument`` for an address that other machines can reach in plain text, ``Unavailable`` for one
        that cannot be bound.
        """
        self._local = await self._serve_locally(tls)  # before gRPC: a peer that finds gRPC looks for this once
        address = self._bind(tls, public_tls)
        await self._grpc.start()
        return address

    async def close(self, grace: float) -> None:
        """End the calls that still run after ``grace`` seconds."""
        if self._local is not None:
            await self._local.close(grace)
        await self._grpc.stop(grace)

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
        path = sockets.path_beside(self._settings.listen)
        if path is None or tls is not None or self._settings.is_public:
            return None
        edge = self._edge
        server = LocalServer(path, lambda method: edge.service(_CallDetails(method)), self._settings.max_message_bytes)
        try:
            await server.open()
        except OSError as error:
            raise Unavailable(f"listen: cannot bind {path}: {error.strerror}") from None
        return server


@dataclass(slots=True)
class _CallDetails:
    """What ``grpc.HandlerCallDetails`` says about a call, for a local stream."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...] = ()


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
        if credentials is not None:
            port = server.add_secure_port(str(address), credentials)
        else:
            addresses.check_closed(address, insecure=insecure, field=field, remedy=remedy)
            port = server.add_insecure_port(str(address))
    except RuntimeError:
        raise Unavailable(f"{field}: cannot bind {address}; is it taken, or its folder missing?") from None
    return str(address) if address.path else str(addresses.Address(host=address.host, port=port))

"""Options of a relay."""

from typing import Annotated, ClassVar

from msgspec import Meta

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.addresses import parse
from tokenloom.services.runtime.host.limits import GrpcLimits, for_clients
from tokenloom.services.runtime.host.service_settings import (
    Count,
    Descriptor,
    OptionalAddress,
    PublicSettings,
    check_members,
)


def _check_http(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in check_members(values):
        _check_port(value)
    return values


def _check_port(value: str) -> str:
    """Raise ``ValueError`` for an address without a port: of unix sockets the kernel does not count what was taken."""
    if not value:
        return value
    try:
        has_path = bool(parse(value).path)
    except InvalidArgument as error:
        raise ValueError(error.message) from None
    if has_path:
        raise ValueError("connections of unix sockets are not held; give HOST:PORT")
    return value


_Port = Annotated[str, Meta(extra={"check": _check_port})]
_STREAMS = 1024
"""Calls of one connection of gRPC."""


class RelaySettings(PublicSettings, frozen=True, kw_only=True):
    """Where clients connect, and the gateways behind."""

    service: ClassVar[str] = "relay"

    grpc_listen: Annotated[OptionalAddress, "Where clients of gRPC connect: HOST:PORT or unix:/PATH; empty: none."] = ""
    grpc_listen_fd: Annotated[
        Descriptor | None,
        "Descriptor of an inherited socket that listens on --grpc-listen and shares the port, as tokenloom serve opens "
        "it.",
    ] = None
    grpc_gateways: Annotated[
        Annotated[tuple[str, ...], Meta(extra={"check": check_members})],
        "Addresses of gateways for gRPC in plain text, separated by commas; dns:///name:port stands for every address "
        "that the name has.",
    ] = ()
    https_listen: Annotated[_Port, "Where clients of HTTPS connect: HOST:PORT; empty: none."] = ""
    https_listen_fd: Annotated[
        Descriptor | None,
        "Descriptor of an inherited socket that listens on --https-listen. It keeps connections waiting while the "
        "relay restarts.",
    ] = None
    http_gateways: Annotated[
        Annotated[tuple[str, ...], Meta(extra={"check": _check_http})],
        "HOST:PORT of gateways for HTTP in plain text, separated by commas.",
    ] = ()
    max_client_connections: Annotated[
        Count,
        "Connections of clients over HTTPS, and as many over gRPC; fewer if the limit of open descriptors is too low.",
    ] = 16384
    max_client_connections_per_peer: Annotated[
        Count, "Connections over HTTPS from one address; further ones are closed."
    ] = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        pairs = ((self.grpc_listen, self.grpc_gateways), (self.https_listen, self.http_gateways))
        if not any(listen for listen, _ in pairs) or any(bool(listen) != bool(gateways) for listen, gateways in pairs):
            raise ValueError("--grpc-listen needs --grpc-gateways, --https-listen needs --http-gateways; give one pair")
        if self.https_listen and self.public_tls_cert is None:
            raise ValueError("--https-listen needs --public-tls-cert and --public-tls-key")

    @property
    def most_connections(self) -> int:
        """Connections of clients over HTTPS, and over gRPC; the former have one each to a gateway."""
        return for_clients(self.max_client_connections, 3)

    @property
    def client_limits(self) -> GrpcLimits:
        """The limits of clients of gRPC, who may be silent as long as at a gateway."""
        return GrpcLimits(self.most_connections, streams=_STREAMS, is_patient=True)

"""Configures the channels from a client to its gateways, and says why one cannot be connected to."""

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.request.limits import MAX_MESSAGE_BYTES

S = TypeVar("S")
Metadata = tuple[tuple[str, str | bytes], ...]

TLS = bool | Path
"""False: plain text. True: trust the well-known certificate authorities. A PEM file: trust the authorities in it."""

# How gRPC's text begins where no connection was made: neither for this call nor by an earlier one.
_NO_CONNECTION = ("failed to connect to all addresses", "errors resolving ", "DNS resolution failed ")
_HINTS = {
    "Failed parsing HTTP/2": "this port does not speak gRPC; the port of a gateway for gRPC is 1000 above the one for "
    "HTTP unless --grpc-port says otherwise: try {near}",
    "HTTP proxy returned": "a proxy refused the connection; name the gateway in no_proxy, or unset http_proxy",
    "Ssl handshake failed": "the gateway speaks plain text, or its certificate is not trusted",
}
"""What helps, by a part of gRPC's text; ``near``: the address 1000 ports above."""


def channel_options(address: str) -> list[tuple[str, int | str]]:
    """Return the options of a channel to ``host:port`` or ``unix:/path``."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Limits an attempt to connect: a gateway that restarts leaves its clients waiting for so long.
        ("grpc.min_reconnect_backoff_ms", 10_000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # A gateway that is silent while it should be streaming is noticed within 10 s, while the mesh still keeps the
        # request of a connection that broke (`--keep-disconnected-requests`).
        ("grpc.keepalive_time_ms", 5_000),
        ("grpc.keepalive_timeout_ms", 5_000),
    ]
    if address.startswith("unix:"):
        options.append(("grpc.default_authority", "localhost"))  # a path is not a host name
    if _is_of_this_machine(address):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy's loopback is another machine's
    return options


def addresses(target: str) -> list[str]:
    """Return the gateways of a comma-separated list, in order. Raises ``InvalidArgument`` if there is none."""
    found = [address.strip() for address in target.split(",") if address.strip()]
    if not found:
        raise InvalidArgument("the client needs the address of at least one gateway", "address")
    return found


def credentials(tls: TLS) -> grpc.ChannelCredentials | None:
    """Return None for plain text. Raises ``OSError`` if the file cannot be read."""
    if tls is False:
        return None
    return grpc.ssl_channel_credentials(None if tls is True else tls.read_bytes())


def metadata(api_key: str | None) -> Metadata:
    """Return the metadata of every call."""
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


class Gateways(Generic[S]):
    """Holds a stub for each gateway, one of which is in use.

    Attributes:
        current: The one in use.
        have_answered: Whether one of them has ever answered a call, be it with an error.
    """

    def __init__(self, stubs: Mapping[str, S]) -> None:
        """``stubs``: at least one, by address."""
        self._addresses, self._stubs = list(stubs), list(stubs.values())
        self._causes: dict[str, str] = {}
        """Why no connection was made, by the addresses that were tried in turn."""
        self.current = self._stubs[0]
        self.have_answered = False

    def leave(self, stub: S) -> None:
        """Use the next gateway, unless another call has left this one already."""
        if stub is self.current:
            self.current = self._stubs[(self._stubs.index(stub) + 1) % len(self._stubs)]

    def try_another(self, stub: S, details: str) -> bool:
        """Leave a gateway to which a connection failed, and return whether the next one is to be called at once.

        ``details``: gRPC's text of the failed call. Raises ``Unavailable``, with addresses and causes, where no gateway
        has ever answered and none can be connected to: a wrong address would otherwise be tried for 15 s.
        """
        self.leave(stub)
        if self.have_answered or not details.startswith(_NO_CONNECTION):
            return False
        address = self._addresses[self._stubs.index(stub)]
        self._causes[address] = self.describe(stub, details)
        if len(self._causes) < len(self._stubs):
            return True
        causes = "; ".join(self._causes.values())
        self._causes.clear()
        raise Unavailable(causes)

    def describe(self, stub: S, details: str) -> str:
        """Return which connection failed and why. ``details``: gRPC's text of the failed call."""
        address = self._addresses[self._stubs.index(stub)]
        if not details.startswith(_NO_CONNECTION):
            return f"the connection to {address} was lost: {details}"
        cause = re.sub(r"^[A-Z_]+: ", "", details.rsplit("last error: ", 1)[-1].removesuffix("()").strip())
        hint = next((f" ({hint})" for part, hint in _HINTS.items() if part in details), "")
        host, _, port = address.rpartition(":")
        near = f"{host}:{int(port) + 1000}" if port.isdecimal() else "another port"
        return f"cannot connect to {address}: {cause}{hint.format(near=near)}"


def _is_of_this_machine(address: str) -> bool:
    host = address.rsplit(":", 1)[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or address.startswith("unix:")

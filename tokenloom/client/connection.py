"""Configures the channel from a client to a gateway."""

from collections.abc import Sequence
from pathlib import Path
from typing import Generic, TypeVar

import grpc

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.peers.message_limit import MAX_MESSAGE_BYTES

S = TypeVar("S")
Metadata = tuple[tuple[str, str | bytes], ...]

TLS = bool | Path
"""False: plain text. True: trust the well-known certificate authorities. A PEM file: trust the authorities in it."""


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
    """

    def __init__(self, stubs: Sequence[S]) -> None:
        """``stubs``: [n >= 1]."""
        self._stubs = stubs
        self.current = stubs[0]

    def leave(self, stub: S) -> None:
        """Use the next gateway, unless another call has left this one already."""
        if stub is self.current:
            self.current = self._stubs[(self._stubs.index(stub) + 1) % len(self._stubs)]

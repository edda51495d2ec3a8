"""Parses addresses: ``host:port``, ``[::1]:port`` or ``unix:/path``."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from tokenloom.request.errors import InvalidArgument

MAX_UNIX_PATH = 107
"""Bytes that Linux allows for a socket's path, without the closing zero."""
STREAMS_SUFFIX = ".calls"
"""Follows the path of a unix socket: where the same process takes the local streams of its machine."""
CHANGED_SUFFIX = ".changed"
"""Takes the place of a state file's: a socket of the supervisor, which gets an empty datagram when the file changes."""
DNS = "dns:///"
"""Prefix of an address (``dns:///name:port``) whose name has an entry per replica, as a headless Service's has."""


def draft_of(state_file: Path, pid: int) -> Path:
    """Return where a process writes its state before that replaces the file."""
    return state_file.with_name(f".{state_file.name}.{pid}")


@dataclass(frozen=True)
class Address:
    """Names where to listen or connect: a unix socket's path, or a host and a port."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the address."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse(text: str, *, field: str = "address") -> Address:
    """Parse an address. Raises ``InvalidArgument`` naming ``field``."""
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path[2:] if path.startswith("///") else path
        if not path or len(path.encode()) > MAX_UNIX_PATH:
            raise InvalidArgument(f"the path of a unix socket must have 1 to {MAX_UNIX_PATH} bytes: {text!r}", field)
        return Address(path=path)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidArgument(f"expected host:port or unix:/path, not {text!r}", field)
    return Address(host=host, port=int(port))


def check_closed(address: Address, *, insecure: bool, field: str = "listen", remedy: str = "give --tls-cert") -> None:
    """Raise ``InvalidArgument`` for an address that other machines can reach without encryption, unless ``insecure``.

    ``remedy``: how to encrypt it, for the message.
    """
    if not address.is_local and not insecure:
        raise InvalidArgument(
            f"{field}: other machines could reach {address} without encryption; "
            f"listen on loopback or a unix socket, {remedy}, or pass --insecure",
            field,
        )


def parse_member(text: str, *, field: str = "address") -> str:
    """Return an address or DNS name in its canonical form. Raises ``InvalidArgument`` naming ``field``."""
    if not text.startswith(DNS):
        return str(parse(text, field=field))
    named = parse(text.removeprefix(DNS), field=field)
    if named.path:
        raise InvalidArgument(f"expected dns:///name:port, not {text!r}", field)
    return f"{DNS}{named}"

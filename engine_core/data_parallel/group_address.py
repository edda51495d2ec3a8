"""The address of a data-parallel group's hub: ``unix:/path`` or ``host:port``."""

import ipaddress
import socket

from tokenloom.process import unix_socket

_PREFIX = "unix:"
CONNECT_SECONDS = 5.0
_BACKLOG = 128


_EVERY_ADDRESS = "0.0.0.0"
_SILENT_SECONDS = 1
"""A machine that is lost closes no connection: the kernel asks it each second whether it is there, and gives up after
two questions."""


def check_address(address: str, *, has_secret: bool = False) -> None:
    """Raise ``ValueError`` for an address that is not understood, or that other hosts can reach without a secret with
    which ranks prove who they are."""
    if address.startswith(_PREFIX):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"data_parallel_address is {address!r}; use unix:/path or host:port")
    if not has_secret and not _is_loopback(host):
        raise ValueError(
            f"data_parallel_address is {address!r}, which other hosts can reach: name a data_parallel_secret_file, or "
            "use unix:/path or 127.0.0.1:port for ranks of one host"
        )


def listen(address: str) -> socket.socket:
    """Return a socket that listens. A unix socket takes the place of the one that an earlier process left. Raises
    ``OSError``."""
    if address.startswith(_PREFIX):
        path = address.removeprefix(_PREFIX)
        listener = unix_socket.listen(path, _BACKLOG, mode=0o600)
        listener.setblocking(True)
        return listener
    host, _, port = address.rpartition(":")
    return socket.create_server((host, int(port)))


def connect(address: str) -> socket.socket:
    """Return a connected socket. Raises ``OSError``."""
    if address.startswith(_PREFIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(CONNECT_SECONDS)
        try:
            connection.connect(address.removeprefix(_PREFIX))
        except OSError:
            connection.close()
            raise
    else:
        host, _, port = address.rpartition(":")
        connection = socket.create_connection((host, int(port)), CONNECT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        notice_loss(connection)
    connection.settimeout(None)
    return connection


def notice_loss(connection: socket.socket) -> None:
    """Let a connection to another host end within three seconds if that host is lost."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _SILENT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 3000 * _SILENT_SECONDS)


def worker_host(address: str) -> str:
    """Return the address of this host at which workers of the group's other ranks reach those of this one. Raises
    ``OSError`` if the hub's host is unknown, ``ValueError`` for an address that names no host."""
    if is_of_this_host(address):
        return "127.0.0.1"
    host, _, port = address.rpartition(":")
    if host == _EVERY_ADDRESS:  # by it this host would look like one that the others do not reach
        raise ValueError(
            f"data_parallel_address is {address!r}: name the address at which the other ranks reach rank 0"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # finds the interface; nothing is sent
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def is_of_this_host(address: str) -> bool:
    """Return whether only processes of this host can reach an address."""
    return address.startswith(_PREFIX) or _is_loopback(address.rpartition(":")[0])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

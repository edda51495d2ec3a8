"""The address of a data-parallel group's hub: ``unix:/path`` or ``host:port``."""

import contextlib
import ipaddress
import os
import socket

_PREFIX = "unix:"
CONNECT_SECONDS = 5.0


def check_address(address: str) -> None:
    """Raise ``ValueError`` for an address that is not understood, or that other hosts could reach: the ranks do not
    prove who they are."""
    if address.startswith(_PREFIX):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"data_parallel_address is {address!r}; use unix:/path or host:port")
    if not _is_loopback(host):
        raise ValueError(
            f"data_parallel_address is {address!r}: the ranks of a group of a mixture-of-experts model run on one host "
            "so far; use unix:/path or 127.0.0.1:port"
        )


def listen(address: str) -> socket.socket:
    """Return a socket that listens. A unix socket takes the place of the one that an earlier process left."""
    if address.startswith(_PREFIX):
        path = address.removeprefix(_PREFIX)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
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
    connection.settimeout(None)
    return connection


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

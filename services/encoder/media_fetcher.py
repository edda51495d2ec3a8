"""Fetches files of URLs that clients name, from hosts that an operator allows, and never from a private address.

A name is resolved once, all of its addresses are checked, and the one that was checked is dialled: a name that resolves
otherwise a moment later changes nothing. Each redirect is checked the same way.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from tokenloom.request.errors import InvalidArgument, PermissionDenied

FETCH_SECONDS = 10.0
MAX_HOPS = 3
"""Redirects of one fetch."""
_MAX_HEAD_BYTES = 64 << 10
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PORTS = {"http": 80, "https": 443}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the addresses of a host."""
Connect = Callable[[str, int, str | None], Awaitable[_Stream]]
"""Connects to an address and a port; with TLS for the named host, without for None."""


class _Target(NamedTuple):
    """A URL that may be fetched."""

    scheme: str
    host: str
    port: int
    path: str


class MediaFetcher:
    """Fetches files."""

    def __init__(
        self, allowed: Sequence[str], max_bytes: int, resolve: Resolve | None = None, connect: Connect | None = None
    ) -> None:
        """``allowed``: names of hosts; ``*.name`` for all below one. ``resolve``, ``connect``: None for those of the
        event loop."""
        self._allowed = [name.lower().rstrip(".") for name in allowed]
        self._max_bytes = max_bytes
        self._resolve = resolve or _resolve
        self._connect = connect or _connect

    async def fetch(self, url: str, max_bytes: int | None = None) -> bytes:
        """Return the file of a URL. ``max_bytes``: it may have, if they are others than those of the other files.

        Raises ``PermissionDenied`` for a host or an address that is not allowed, ``InvalidArgument`` for a file that is
        too large, does not come in time, or is not there.
        """
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                for _ in range(MAX_HOPS + 1):
                    target = self._target(url)
                    location, data = await self._get(target, max_bytes or self._max_bytes)
                    if location is None:
                        return data
                    next_url = urljoin(url, location)
                    if target.scheme == "https" and not next_url.startswith("https:"):
                        raise PermissionDenied("The URL redirects from https to another scheme.", "url")
                    url = next_url
        except TimeoutError:
            raise InvalidArgument(f"The file did not arrive within {FETCH_SECONDS:g} s.", "url") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise InvalidArgument(f"The URL cannot be fetched: {_cause(error)}.", "url") from error
        raise InvalidArgument(f"The URL redirects more than {MAX_HOPS} times.", "url")

    def _target(self, url: str) -> _Target:
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise InvalidArgument("A URL must begin with http:// or https:// and name a host.", "url")
        if parts.username is not None or parts.password is not None:
            raise InvalidArgument("A URL must not carry a name or a password.", "url")
        host = parts.hostname.rstrip(".")
        if not _is_address(host):
            host = host.encode("idna").decode().lower()
        if not any(_matches(host, name) for name in self._allowed):
            raise PermissionDenied(f"Files are not fetched from {host}; send the file itself in the request.", "url")
        path = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~-._")
        query = f"?{quote(parts.query, safe='/%:@!$&()*+,;=~-._?')}" if parts.query else ""
        return _Target(parts.scheme, host, parts.port or _PORTS[parts.scheme], path + query)

    async def _get(self, target: _Target, max_bytes: int) -> tuple[str | None, bytes]:
        """Return where a redirect leads, or None and the file."""
        addresses = await self._resolve(target.host, target.port)
        if not addresses or not all(map(is_public, addresses)):
            raise PermissionDenied(f"{target.host} has no public address.", "url")
        name = target.host if target.scheme == "https" else None
        reader, writer = await self._dial(addresses, target.port, name)
        try:
            writer.write(_request(target))
            await writer.drain()
            return await self._answer(reader, max_bytes)
        finally:
            writer.close()

    async def _dial(self, addresses: Sequence[str], port: int, name: str | None) -> _Stream:
        """Connect to the first of these addresses that answers. Raises ``OSError`` if none does."""
        failure: OSError | None = None
        for address in addresses:
            try:
                return await self._connect(address, port, name)
            except OSError as error:  # for example of IPv6, which this machine has not
                failure = error
        assert failure is not None  # there is an address
        raise failure

    async def _answer(self, reader: asyncio.StreamReader, max_bytes: int) -> tuple[str | None, bytes]:
        status, headers = _head(await reader.readuntil(b"\r\n\r\n"))
        if status in _REDIRECTS and "location" in headers:
            return headers["location"], b""
        if status != 200:
            raise InvalidArgument(f"The URL answers with status {status}.", "url")
        if headers.get("content-encoding", "identity") != "identity":
            raise InvalidArgument("The URL answers in an encoding that was not asked for.", "url")
        if "chunked" in headers.get("transfer-encoding", ""):
            return None, await _chunks(reader, max_bytes)
        length = headers.get("content-length")
        if length is None:
            return None, await _until_end(reader, max_bytes)
        _check_size(int(length), max_bytes)
        return None, await reader.readexactly(int(length))


async def _chunks(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    data = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        _check_size(len(data) + size, max_bytes)
        data += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(data)


async def _until_end(reader: asyncio.StreamReader, max_bytes: int) -> bytes:
    data = bytearray()
    while piece := await reader.read(1 << 16):
        data += piece
        _check_size(len(data), max_bytes)
    return bytes(data)


def _check_size(size: int, max_bytes: int) -> None:
    if not 0 <= size <= max_bytes:
        raise InvalidArgument(f"The file has more than {max_bytes:,} bytes.", "url")


def is_public(address: str) -> bool:
    """Return whether an address belongs to the internet, and not to this machine or its networks."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        # An address of one of these forms reaches the IPv4 address that it holds.
        held = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if found in _NAT64:
            held = ipaddress.IPv4Address(int(found) & 0xFFFF_FFFF)
        if held is not None:
            return is_public(str(held))
    return found.is_global and not found.is_multicast


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _matches(host: str, name: str) -> bool:
    return host.endswith(name[1:]) if name.startswith("*.") else host == name


def _request(target: _Target) -> bytes:
    host = f"[{target.host}]" if ":" in target.host else target.host
    port = "" if target.port == _PORTS[target.scheme] else f":{target.port}"
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {host}{port}",
        "User-Agent: tokenloom",
        "Accept: */*",
        "Accept-Encoding: identity",
        "Connection: close",
    )
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")


def _head(data: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = data.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1."):
        raise ValueError("the answer is not HTTP/1.1")
    pairs = (line.partition(":") for line in lines if line)
    return int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in pairs}


def _cause(error: Exception) -> str:
    if isinstance(error, socket.gaierror):
        return "the host has no address"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the answer ends early"
    return "the connection fails" if isinstance(error, OSError) else "the answer is not HTTP"


async def _resolve(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


async def _connect(address: str, port: int, name: str | None) -> _Stream:
    tls = None if name is None else _authorities()
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name, limit=_MAX_HEAD_BYTES)


@cache
def _authorities() -> ssl.SSLContext:
    return ssl.create_default_context()  # once: reading the authorities' certificates takes 20 ms

"""Finds the replicas of a service: given addresses, and DNS names with one entry per replica."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence

from . import addresses
from .addresses import DNS, Address

log = logging.getLogger(__name__)

REFRESH_SECONDS = 2.0

Resolve = Callable[[str, int], Awaitable[Iterable[str]]]
"""Returns the IP addresses of a name and port. Raises ``OSError`` when they are not known now."""


class Members:
    """Holds the replicas' current addresses. One that left may finish what it has begun, but gets no new work."""

    def __init__(self, given: Sequence[str], resolve: Resolve | None = None) -> None:
        self._fixed = frozenset(address for address in given if not address.startswith(DNS))
        self._names = [addresses.parse(name.removeprefix(DNS)) for name in given if name.startswith(DNS)]
        self._resolve = resolve or _resolve
        self._found: dict[Address, frozenset[str]] = {}

    def __contains__(self, address: str) -> bool:
        return address in self._fixed or any(address in found for found in self._found.values())

    async def watch(self, joined: Callable[[str], None]) -> None:
        """Call ``joined`` for each address that appears, or appears again, until cancelled."""
        for address in sorted(self._fixed):
            joined(address)
        while self._names:
            for name in self._names:
                await self._look_up(name, joined)
            await asyncio.sleep(REFRESH_SECONDS)
        await asyncio.Event().wait()

    async def _look_up(self, name: Address, joined: Callable[[str], None]) -> None:
        try:
            hosts = await self._resolve(name.host, name.port)
        except OSError as error:  # the known addresses stay
            log.debug("%s cannot be resolved: %s", name, error)
            return
        before, now = self._found.get(name, frozenset()), frozenset(str(Address(host=h, port=name.port)) for h in hosts)
        self._found[name] = now
        for address in sorted(now - before):
            joined(address)


async def _resolve(host: str, port: int) -> Iterable[str]:
    entries = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]

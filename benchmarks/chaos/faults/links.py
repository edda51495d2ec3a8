"""Puts proxies in front of the parts of a local mesh, so that links can be cut, delayed and reset."""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from tokenloom.services.runtime.addresses import STREAMS_SUFFIX, Address
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import reserve

from .fault import Action
from .proxy import Connect, Gate, Proxy

DELAY_SECONDS = 0.1
"""How late each piece arrives over a link with a delay."""
_REAL = "-real"
_HOST = "127.0.0.1"
"""Where parts listen for proxies that delay what passes."""


class PartLink:
    """Holds the proxies in front of one part."""

    def __init__(self, proxies: list[Proxy], delay: float = 0.0) -> None:
        """``delay``: seconds by which each piece is late without a fault."""
        self._proxies = proxies
        self._delay = delay
        self.end()

    def begin(self, action: Action) -> int:
        """Begin a fault; return the number of connections that it meets."""
        met = sum(proxy.num_connections for proxy in self._proxies)
        for proxy in self._proxies:
            if action is Action.RESET:
                proxy.reset()
            if action in (Action.CUT, Action.CUT_TO):
                proxy.to_server.close()
            if action in (Action.CUT, Action.CUT_FROM):
                proxy.from_server.close()
            if action is Action.DELAY:
                proxy.to_server.delay = proxy.from_server.delay = self._delay + DELAY_SECONDS
                proxy.to_server.delayed_bytes = proxy.from_server.delayed_bytes = 0
        return met

    def end(self) -> None:
        """Let everything pass again as without a fault."""
        for gate in self._gates():
            gate.delay = self._delay
            gate.open()

    def held_bytes(self) -> int:
        """Return how many bytes were held since the last cut began."""
        return sum(gate.held_bytes for gate in self._gates())

    def delayed_bytes(self) -> int:
        """Return how many bytes were late since the last delay began."""
        return sum(gate.delayed_bytes for gate in self._gates())

    def _gates(self) -> list[Gate]:
        return [gate for proxy in self._proxies for gate in (proxy.to_server, proxy.from_server)]


class Links:
    """Owns the proxies of a mesh. Use as ``async with``."""

    def __init__(self, delay: float = 0.0) -> None:
        """``delay``: seconds by which each piece is late, in each direction, all the time. With one, parts listen on
        TCP ports behind their proxies, so that a network device that loses packets concerns them too."""
        self.by_part: dict[str, PartLink] = {}
        self._delay = delay
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> "Links":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def in_front_of(self, spec: PartSpec) -> PartSpec:
        """Start proxies at the unix sockets of a part; return its specification with other sockets to listen on.

        Its socket for local streams gets none, so that peers use gRPC as between hosts: a local stream relies on the
        kernel, which loses no bytes between two processes of one host.
        """
        moved, command, proxies = [], list(spec.command), []
        real: dict[Path, Address] = {}
        for path in spec.leftovers:
            if path.name.endswith(STREAMS_SUFFIX):
                moved.append(_real_path(path))
                continue
            real[path] = self._free_port() if self._delay else Address(path=str(_real_path(path)))
            if not self._delay:
                moved.append(_real_path(path))
            proxies.append(await self._proxy(path, real[path]))
        for index, argument in enumerate(spec.command):
            if argument in ("--listen", "--kv-listen"):
                address = spec.command[index + 1]
                command[index + 1] = str(real[Path(address.removeprefix("unix:"))])
                if spec.service == "engine":
                    command += [argument.replace("listen", "advertise-address"), address]
        self.by_part[spec.name] = PartLink(proxies, self._delay)
        return replace(spec, command=tuple(command), leftovers=tuple(moved))

    def _free_port(self) -> Address:
        """Return a port that stays free for its part until the links end."""
        held = self._stack.enter_context(reserve(_HOST, 0))
        return Address(host=_HOST, port=held.getsockname()[1])

    async def in_front_of_gateway(self, name: str, addresses: Iterable[str]) -> list[str]:
        """Start proxies in front of a gateway's addresses, ``host:port``; return the addresses that clients use."""
        proxies, shown = [], []
        for address in addresses:
            host, _, port = address.rpartition(":")
            proxy = Proxy(_connector(Address(host=host, port=int(port))))
            shown.append(f"{host}:{await proxy.listen_tcp(host, 0)}")
            self._stack.push_async_callback(proxy.close)
            proxies.append(proxy)
        self.by_part[name] = PartLink(proxies, self._delay)
        return shown

    async def _proxy(self, front: Path, real: Address) -> Proxy:
        proxy = Proxy(_connector(real))
        await proxy.listen_unix(str(front))
        self._stack.push_async_callback(proxy.close)
        return proxy


def _connector(address: Address) -> Connect:
    if address.path:
        return lambda: asyncio.open_unix_connection(address.path)
    return lambda: asyncio.open_connection(address.host, address.port)


def _real_path(path: Path) -> Path:
    name = path.name
    suffix = STREAMS_SUFFIX if name.endswith(STREAMS_SUFFIX) else ""
    stem = name.removesuffix(suffix).removesuffix(".sock")
    return path.with_name(f"{stem}{_REAL}.sock{suffix}")

"""Puts proxies in front of the parts of a local mesh, so that links can be cut, delayed and reset."""

from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from tokenloom.services.runtime.addresses import STREAMS_SUFFIX, Address
from tokenloom.supervisor.part_spec import PartSpec
from tokenloom.supervisor.ports import reserve

from .link_process import Front, LinkProcess
from .part_link import Link

_REAL = "-real"
_HOST = "127.0.0.1"
"""Where parts listen for proxies that delay what passes."""


class Links:
    """Owns the process that has the proxies of a mesh. Use as ``async with``."""

    def __init__(self, delay: float = 0.0) -> None:
        """``delay``: seconds by which each piece is late, in each direction, all the time. With one, parts listen on
        TCP ports behind their proxies, so that a network device that loses packets concerns them too."""
        self.by_part: dict[str, Link] = {}
        self._delay = delay
        self._stack = AsyncExitStack()
        self._process: LinkProcess | None = None  # None: nothing has a proxy yet

    async def __aenter__(self) -> "Links":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._process = None

    @property
    def pid(self) -> int | None:
        """Of the process that has the proxies; None: there is none."""
        return None if self._process is None else self._process.pid

    async def in_front_of(self, spec: PartSpec) -> PartSpec:
        """Start proxies at the unix sockets of a part; return its specification with other sockets to listen on.

        Its socket for local streams gets none, so that peers use gRPC as between hosts: a local stream relies on the
        kernel, which loses no bytes between two processes of one host.
        """
        moved, command, fronts = [], list(spec.command), list[Front]()
        real: dict[Path, Address] = {}
        for path in spec.leftovers:
            if path.name.endswith(STREAMS_SUFFIX):
                moved.append(_real_path(path))
                continue
            real[path] = self._free_port() if self._delay else Address(path=str(_real_path(path)))
            if not self._delay:
                moved.append(_real_path(path))
            fronts.append((f"unix:{path}", str(real[path])))
        for index, argument in enumerate(spec.command):
            if argument in ("--listen", "--kv-listen"):
                address = spec.command[index + 1]
                command[index + 1] = str(real[Path(address.removeprefix("unix:"))])
                if spec.service == "engine":
                    command += [argument.replace("listen", "advertise-address"), address]
        self._listen(spec.name, fronts)
        return replace(spec, command=tuple(command), leftovers=tuple(moved))

    def _free_port(self) -> Address:
        """Return a port that stays free for its part until the links end."""
        held = self._stack.enter_context(reserve(_HOST, 0))
        return Address(host=_HOST, port=held.getsockname()[1])

    async def in_front_of_gateway(self, name: str, addresses: Iterable[str]) -> list[str]:
        """Start proxies in front of a gateway's addresses, ``host:port``; return the addresses that clients use."""
        return self._listen(name, [(f"{address.rpartition(':')[0]}:0", address) for address in addresses])

    def _listen(self, name: str, fronts: Sequence[Front]) -> list[str]:
        """Start proxies in front of a part; return where its clients connect."""
        if self._process is None:
            self._process = LinkProcess()
            self._stack.callback(self._process.close)
        self.by_part[name], shown = self._process.listen(name, fronts, self._delay)
        return shown


def _real_path(path: Path) -> Path:
    name = path.name
    suffix = STREAMS_SUFFIX if name.endswith(STREAMS_SUFFIX) else ""
    stem = name.removesuffix(suffix).removesuffix(".sock")
    return path.with_name(f"{stem}{_REAL}.sock{suffix}")

"""``python -m benchmarks.chaos.faults.link_process FD``: the proxies of a mesh, in a process of their own.

In the process of the clients they would share its event loop: where that is late, all links of the mesh are silent at
the same time, and every part takes its peers for lost. The clients' process calls this one for what it wants to know or
change, one call at a time.
"""

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tokenloom.services.runtime.addresses import Address, parse

from .fault import Action
from .part_link import PartLink
from .proxy import Connect, Proxy

_MOST_BYTES = 1 << 16
"""Of a call or its result: names, addresses and numbers."""
_SECONDS = 60.0
"""Limit of one call; the machine may be busy."""

Front = tuple[str, str]
"""Where clients of a part connect (``unix:/path``, or ``host:0`` for any port), and where the part listens."""


class LinkProcess:
    """Starts the process, and calls it. Its calls raise ``RuntimeError`` where it has ended."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(_SECONDS)
        with theirs:
            command = [sys.executable, "-m", "benchmarks.chaos.faults.link_process", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),))

    @property
    def pid(self) -> int:
        return self._process.pid

    def listen(self, name: str, fronts: Sequence[Front], delay: float) -> tuple["RemoteLink", list[str]]:
        """Start the proxies in front of a part. Return its link, and where the clients connect. ``delay``: seconds by
        which each piece is late."""
        return RemoteLink(self, name), self.call("listen", name, list(fronts), delay)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`_Links`, and return what it returns."""
        try:
            self._ours.send(json.dumps([method, *arguments]).encode())
            result = self._ours.recv(_MOST_BYTES)
        except OSError as error:
            raise RuntimeError(f"the process of the proxies does not answer: {error}") from error
        if not result:
            raise RuntimeError("the process of the proxies has ended")
        return json.loads(result)

    def close(self) -> None:
        """End the process, and with it all connections."""
        self._ours.close()
        self._process.wait()


class RemoteLink:
    """What :class:`.part_link.PartLink` is, whose proxies are in the process."""

    def __init__(self, process: LinkProcess, name: str) -> None:
        self._process = process
        self._name = name

    def begin(self, action: Action) -> int:
        return int(self._process.call("begin", self._name, action.value))

    def end(self) -> None:
        self._process.call("end", self._name)

    def held_bytes(self) -> int:
        return int(self._process.call("held_bytes", self._name))

    def delayed_bytes(self) -> int:
        return int(self._process.call("delayed_bytes", self._name))


class _Links:
    """The links of the process, by the names of their parts."""

    def __init__(self) -> None:
        self._by_part: dict[str, PartLink] = {}

    async def listen(self, name: str, fronts: Sequence[Front], delay: float) -> list[str]:
        proxies, shown = [], []
        for front, real in fronts:
            proxy, where = Proxy(_connector(parse(real))), parse(front)
            proxies.append(proxy)
            if where.path:
                await proxy.listen_unix(where.path)
                shown.append(front)
            else:
                shown.append(f"{where.host}:{await proxy.listen_tcp(where.host, where.port)}")
        self._by_part[name] = PartLink(proxies, delay)
        return shown

    async def begin(self, name: str, action: str) -> int:
        return self._by_part[name].begin(Action(action))

    async def end(self, name: str) -> None:
        self._by_part[name].end()

    async def held_bytes(self, name: str) -> int:
        return self._by_part[name].held_bytes()

    async def delayed_bytes(self, name: str) -> int:
        return self._by_part[name].delayed_bytes()


def _connector(address: Address) -> Connect:
    if address.path:
        return lambda: asyncio.open_unix_connection(address.path)
    return lambda: asyncio.open_connection(address.host, address.port)


async def _serve(control: socket.socket) -> None:
    """Answer calls until the caller ends."""
    links, loop = _Links(), asyncio.get_running_loop()
    control.setblocking(False)
    while call := await loop.sock_recv(control, _MOST_BYTES):
        method, *arguments = json.loads(call)
        await loop.sock_sendall(control, json.dumps(await getattr(links, method)(*arguments)).encode())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal, which the clients' process gets too
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))

"""One render worker, from the side of the service."""

import asyncio
import json
import socket
import subprocess
import sys
from typing import Self

from tokenloom.request import errors

from .render_worker import LENGTH, Reply, Setup, pack

_START_SECONDS = 20.0


class RenderProcess:
    """A child process that answers one message with one message."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def start(cls, setup: Setup) -> Self:
        """Raises ``Unavailable`` when it does not come up, ``InvalidArgument`` when the template is not one."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.to_thread(_spawn, theirs)
        except BaseException:
            ours.close()
            raise
        worker = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(_START_SECONDS):
                reply = await worker.exchange(pack(setup))
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await worker.kill()
            raise errors.Unavailable("the process that renders chat templates does not start") from error
        except asyncio.CancelledError:
            await worker.kill()
            raise
        if "refused" in reply:
            await worker.kill()
            raise errors.InvalidArgument(reply["refused"], "model")
        return worker

    async def exchange(self, request: bytes) -> Reply:
        """Sends a packed message and awaits the answer. When that is cut short, only :meth:`kill` is left to do."""
        self._writer.write(request)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        reply: Reply = json.loads(await self._reader.readexactly(length))
        return reply

    async def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)


def _spawn(theirs: socket.socket) -> "subprocess.Popen[bytes]":
    # Not through the event loop: uvloop forks, which gRPC's threads do not take well; subprocess uses vfork.
    command = [sys.executable, "-m", f"{__package__}.render_worker"]
    return subprocess.Popen(command, stdin=theirs.fileno(), stdout=theirs.fileno())

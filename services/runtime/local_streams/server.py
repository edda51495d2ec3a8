"""Serves local streams, with the handlers that gRPC serves too."""

import asyncio
import logging

from ..host.tasks import Tasks
from . import sockets
from .connection import Connection
from .server_call import FindHandler, ServerCall

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 0.25
"""For callers to read the last status before their connection is cut."""


class LocalServer:
    """Serves from :meth:`open` to :meth:`close`."""

    def __init__(self, path: str, find: FindHandler, max_message_bytes: int) -> None:
        """``max_message_bytes``: of a message, either way."""
        self._path = path
        self._find = find
        self._max_message_bytes = max_message_bytes
        self._calls: set[ServerCall] = set()  # one for each connection
        self._tasks = Tasks(lambda error: log.error("a local stream failed", exc_info=error))
        self._server: asyncio.AbstractServer | None = None
        self._file: sockets.SocketFile | None = None

    async def open(self) -> None:
        """Binds; ``OSError`` when that cannot be."""
        listener = sockets.listen(self._path)
        self._file = sockets.SocketFile(self._path)
        self._server = await asyncio.get_running_loop().create_unix_server(self._accept, sock=listener)

    async def close(self, grace: float) -> None:
        """Takes no new calls; those that still run after ``grace`` seconds end with UNAVAILABLE. Idempotent."""
        if self._server is None or self._file is None:
            return
        self._server.close()
        self._file.remove()
        if handlers := [call.handler for call in self._calls if call.handler is not None]:
            await asyncio.wait(handlers, timeout=grace)
        for call in self._calls:
            call.stop()
        await self._tasks.close()
        await self._callers_gone()
        for call in self._calls:
            call.connection.abort()
        await self._server.wait_closed()

    def _accept(self) -> Connection:
        call = ServerCall(self._find, self._tasks, self._max_message_bytes, self._calls.discard)
        self._calls.add(call)
        return call.connection

    async def _callers_gone(self) -> None:
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                for call in list(self._calls):
                    await call.gone.wait()
        except TimeoutError:
            pass

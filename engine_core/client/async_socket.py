"""One direction of a ZMQ socket in an event loop: a plain socket, without the futures and polls of ``zmq.asyncio``."""

import asyncio
from collections.abc import Sequence
from typing import cast

import zmq

from ..wire.serialization import Frame

_READABLE = int(zmq.POLLIN)


class AsyncSocket:
    """Receives or sends, never both: what the one does would swallow the signal that the other waits for.

    ZMQ signals once, when a socket that had nothing to give (or to take) can go on. So it is asked first, and an
    operation waits only after ZMQ refused it.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """``socket``: PULL or PUSH; closed by whoever made it, after :meth:`fail`."""
        self._socket = socket
        self._turn = asyncio.Lock()  # operations begin in the order in which they were called
        self._loop: asyncio.AbstractEventLoop | None = None  # while it watches the socket
        self._signal: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def receive(self) -> list[bytes]:
        """The next message's frames; waits for it. Cancelled, it has taken none. Raises what :meth:`fail` was given."""
        async with self._turn:
            while True:
                if self._error is not None:
                    raise self._error
                # Asked first: a refusal is an exception, and after each step's outputs there mostly is nothing more.
                if cast(int, self._socket.get(zmq.EVENTS)) & _READABLE:
                    return self._socket.recv_multipart(zmq.NOBLOCK)
                await self._signalled()

    async def send(self, frames: Sequence[Frame], *, copy: bool) -> None:
        """Sends a message; waits while the socket's queue is full. Raises what :meth:`fail` was given."""
        async with self._turn:
            while True:
                if self._error is not None:
                    raise self._error
                try:
                    self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
                    return
                except zmq.Again:
                    await self._signalled()

    def fail(self, error: Exception) -> None:
        """Ends all operations with ``error``, those to come too; the first error stays."""
        self._error = self._error or error
        self._stop_watching()
        self._wake()

    async def _signalled(self) -> None:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._socket.fileno(), self._on_signal)
        self._signal = asyncio.get_running_loop().create_future()
        try:
            await self._signal
        finally:
            self._signal = None

    def _on_signal(self) -> None:
        if self._signal is None:  # nobody takes it: watching on would only spin
            self._stop_watching()
        self._wake()

    def _stop_watching(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None

    def _wake(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

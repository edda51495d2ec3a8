"""Wraps a plain ZMQ socket for an event loop, in one direction, without the futures and polls of ``zmq.asyncio``."""

import asyncio
from collections.abc import Sequence
from typing import cast

import zmq

from ..wire.serialization import Frame

_READABLE = int(zmq.POLLIN)


class AsyncSocket:
    """Receives or sends, never both, because either direction would consume the signal that the other waits for.

    ZMQ signals only once when a socket becomes readable (or writable). Therefore each operation is tried first, and
    waits for the signal only if ZMQ refuses it.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        """``socket``: PULL or PUSH; the caller closes it, after :meth:`fail`."""
        self._socket = socket
        self._turn = asyncio.Lock()  # operations start in the order of their calls
        self._loop: asyncio.AbstractEventLoop | None = None  # while it watches the socket
        self._signal: asyncio.Future[None] | None = None
        self._error: Exception | None = None

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message. Cancelling loses no message. Raises the error of :meth:`fail`."""
        async with self._turn:
            while True:
                if self._error is not None:
                    raise self._error
                # The check avoids an exception: after the outputs of a step there is mostly no further message.
                if cast(int, self._socket.get(zmq.EVENTS)) & _READABLE:
                    return self._socket.recv_multipart(zmq.NOBLOCK)
                await self._signalled()

    async def send(self, frames: Sequence[Frame], *, copy: bool) -> None:
        """Send a message; wait while the socket's queue is full. Raises the error of :meth:`fail`."""
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
        """End all operations with ``error``, later ones too. The first error wins."""
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
        if self._signal is None:  # no operation waits: the loop would spin if it kept watching
            self._stop_watching()
        self._wake()

    def _stop_watching(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None

    def _wake(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)

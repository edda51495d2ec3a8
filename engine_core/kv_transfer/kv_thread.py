"""The KV thread of a core's process. It has its own socket to the front, so it answers while a step runs."""

import contextlib
import math
import os
import threading

import zmq

from ..data.kv_messages import KVCall
from ..wire.serialization import Decoder, encode
from .kv_service import KVService


class KVThread:
    """Runs a :class:`KVService` over one end of a ZMQ PAIR."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, service: KVService) -> None:
        self._service = service
        self._socket = context.socket(zmq.PAIR)
        self._socket.linger = 0
        self._socket.connect(address)
        self._calls: Decoder[KVCall] = Decoder(KVCall)
        # A full pipe means that the thread will wake anyway.
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="core-kv", daemon=True)
        self._stopping = False
        service.on_wake = self._wake

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread. The service must be closed before, so that no other thread wakes this one."""
        self._stopping = True
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        with self._socket:
            timeout: float | None = 0.0
            while not self._stopping:
                try:
                    # Rounded up: rounded down, the last millisecond before a lease ends would be a busy loop of polls
                    # with timeout 0.
                    poller.poll(None if timeout is None else math.ceil(timeout * 1000))
                    timeout = self._turn()
                except zmq.ContextTerminated:
                    return

    def _turn(self) -> float | None:
        with contextlib.suppress(BlockingIOError):
            # Before the work: a wake-up that arrives during it stays in the pipe and leads to another turn.
            os.read(self._wake_read, 4096)
        while self._socket.poll(0):
            self._service.receive(self._calls.decode(self._socket.recv_multipart()))
        # After all calls are read, so that answers see what the thread that steps has queued by now.
        timeout = self._service.run()
        for event in self._service.take_events():
            self._socket.send_multipart(encode(event))
        return timeout

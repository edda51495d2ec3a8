"""Starts and ends the process of a worker."""

import contextlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

import zmq

from tokenloom.process.rendezvous_dir import RendezvousDir

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError
from ..wire.array_arena import ArenaAddress
from ..wire.serialization import Decoder, encode
from .worker_messages import WorkerFailed, WorkerHello, WorkerInit, WorkerReady

_POLL_MS = 100
"""How often to check, while a worker starts, that its process still runs."""

_Message = WorkerHello | WorkerReady | WorkerFailed
_decoder: Decoder[_Message] = Decoder(_Message)


class WorkerProcess:
    """Holds a worker's process and the socket to it.

    The process reads its standard input only to notice when the parent ends.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        command: Sequence[str],
        rank: int,
        arrays: ArenaAddress | None,
        pool_fd: int | None,
    ) -> None:
        """Start the process with ``command``. It inherits the memory of ``arrays`` and the descriptor ``pool_fd``.

        Raises ``OSError`` and ``zmq.ZMQError`` if the system refuses it.
        """
        self.rank = rank
        self._arrays = arrays
        self._pool_fd = pool_fd
        # Only this user can connect: its mode is 0700. When both processes are killed, a later start removes it.
        self._directory = RendezvousDir("worker")
        self._address = f"ipc://{self._directory.path}/worker"
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        try:
            self.socket.bind(self._address)
            self._process = self._start(command)
        except BaseException:
            self._close_socket()
            raise

    def _start(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        memory = self._arrays.fd if self._arrays is not None else None
        return subprocess.Popen(
            [*command, "--address", self._address],
            # In the session of its core: when that ends, the kernel continues stopped processes of such an orphaned
            # group (SIGHUP, SIGCONT). In a session of its own, a stopped worker kept its memory until SIGCONT came.
            stdin=subprocess.PIPE,
            # In a process group of its own it gets no Ctrl-C of a terminal.
            process_group=0,
            pass_fds=[fd for fd in (memory, self._pool_fd) if fd is not None],
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def shake_hands(self, config: EngineConfig) -> None:
        """Exchange HELLO, INIT with the ``config`` of this rank, and READY.

        Raises ``ValueError`` for a bad configuration, or ``ExecutorFailedError``.
        """
        assert isinstance(self._receive(), WorkerHello)
        self.socket.send_multipart(encode(WorkerInit(config, self.rank, self._arrays, self._pool_fd)))
        assert isinstance(self._receive(), WorkerReady)

    def wait(self) -> int:
        """Wait until the process has ended. Returns its exit status, negative for a signal."""
        return self._process.wait()

    def stop(self) -> None:
        """Kill the process: a worker has nothing to finish."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._close_socket()

    def _close_socket(self) -> None:
        self.socket.close()
        self._directory.remove()

    def _receive(self) -> _Message:
        while not self.socket.poll(_POLL_MS):
            if (status := self._process.poll()) is not None and not self.socket.poll(0):
                raise ExecutorFailedError(f"worker {self.rank} ended with status {status} while it started")
        message = _decoder.decode(self.socket.recv_multipart())
        if isinstance(message, WorkerFailed):
            if message.is_config:
                raise ValueError(message.error)
            raise ExecutorFailedError(f"worker {self.rank} did not start: {message.error}")
        return message


def remove_socket(address: str) -> None:
    """Remove a worker's socket and its directory."""
    path = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()

"""Starting a worker's process, and ending it."""

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from ..config import EngineConfig
from ..errors import ExecutorFailedError
from ..wire.array_arena import ArenaAddress
from ..wire.serialization import Decoder, encode
from .worker_messages import WorkerFailed, WorkerHello, WorkerInit, WorkerReady

_POLL_MS = 100
"""How often a wait for a starting worker looks whether its process still lives."""

_Message = WorkerHello | WorkerReady | WorkerFailed
_decoder: Decoder[_Message] = Decoder(_Message)


class WorkerProcess:
    """A worker's process and the socket to it. It reads its standard input only to learn that this one is gone."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        command: Sequence[str],
        rank: int,
        arrays: ArenaAddress | None,
    ) -> None:
        """Spawns the process, which inherits the memory of ``arrays``."""
        self.rank = rank
        self._arrays = arrays
        # mkdtemp makes it 0700: nobody else can connect.
        self._address = f"ipc://{tempfile.mkdtemp(prefix='tl-worker-')}/worker"
        self.socket = context.socket(zmq.PAIR)
        self.socket.linger = 0
        self.socket.bind(self._address)
        self._process = subprocess.Popen(
            [*command, "--address", self._address],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=() if arrays is None else (arrays.fd,),
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def shake_hands(self, config: EngineConfig, world_size: int) -> None:
        """HELLO → INIT → READY. Raises ``ValueError`` when the configuration is at fault, else
        ``ExecutorFailedError``."""
        assert isinstance(self._receive(), WorkerHello)
        self.socket.send_multipart(encode(WorkerInit(config, self.rank, world_size, self._arrays)))
        assert isinstance(self._receive(), WorkerReady)

    def wait(self) -> int:
        """Blocks until the process has ended; its exit status, negative for a signal."""
        return self._process.wait()

    def stop(self) -> None:
        """Ends the process now: a worker has nothing to finish that anybody would wait for."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self.socket.close()
        remove_socket(self._address)

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
    """Removes a worker's socket and its directory."""
    path = Path(address.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()

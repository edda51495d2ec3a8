"""Starts and ends the process of a worker, and defines its messages: msgpack over one socket pair for each worker."""

import contextlib
import enum
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import zmq

from tokenloom.process.rendezvous_dir import RendezvousDir

from ..data.config import EngineConfig
from ..data.errors import ExecutorFailedError
from ..data.kv_groups import KVCacheConfig
from ..data.scheduler_output import GrammarOutput, ModelRunnerOutput
from ..wire.array_arena import ArenaAddress
from ..wire.frames import Decoder, encode


class WorkerHello(msgspec.Struct, tag="HELLO"):
    """Reports to the executor that the process runs."""

    pid: int


class WorkerInit(msgspec.Struct, tag="INIT"):
    """Configures a worker."""

    config: EngineConfig
    """That of this rank."""
    rank: int
    arrays: ArenaAddress | None
    """Shared memory with the large arrays of steps, which each rank reads; None if they come in frames."""
    pool_fd: int | None
    """Inherited descriptor of the memory for all ranks' KV pools; None if no KV moves."""


class WorkerReady(msgspec.Struct, tag="READY"):
    """Reports to the executor that the worker answers calls from now on."""


class WorkerFailed(msgspec.Struct, tag="FAILED"):
    """Reports to the executor that the worker cannot start.

    Attributes:
        is_config: Whether the configuration is at fault, so that another start would fail in the same way.
    """

    error: str
    is_config: bool


class WorkerRequestType(enum.Enum):
    """Is the first frame of every message to a worker after the handshake."""

    EXECUTE = b"\x00"
    """A SchedulerOutput. It is not answered: an error is the answer to the SAMPLE that follows."""
    SAMPLE = b"\x01"
    """A SampleCall, which ends the latest step. The output rank answers, and every rank that failed; where KV moves,
    every rank answers."""
    CALL = b"\x02"
    """A WorkerCall. Every rank answers."""
    POOL = b"\x03"
    """A PoolCall. Every rank answers."""


class SampleCall(msgspec.Struct, array_like=True, gc=False):
    """Calls ``Worker.sample_tokens``."""

    call_id: int
    grammar: GrammarOutput | None


class WorkerCall(msgspec.Struct, array_like=True, gc=False):
    """Calls a method of ``WORKER_METHODS`` by name."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


class PoolCall(msgspec.Struct, array_like=True, gc=False):
    """Calls ``Worker.initialize_kv_cache`` with the rank's part of the memory for KV pools.

    The result is a ``RankPool``.
    """

    call_id: int
    kv_cache: KVCacheConfig
    part_bytes: int
    """Size of a rank's part; that of rank r begins at r times it."""


class WorkerErrorKind(enum.IntEnum):
    """Classifies an answer without a result."""

    FAILED = 1
    """The worker failed."""
    VALUE = 2
    """The caller made a mistake: it gets a ``ValueError``."""
    PEER = 3
    """A worker of another engine is lost: the caller gets a ``PeerLostError``."""
    DAMAGED = 4
    """Weights in memory have changed by themselves: the caller gets a ``WeightsDamagedError``."""


class WorkerReply(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Answers the SAMPLE, CALL or POOL with the same id."""

    call_id: int
    output: ModelRunnerOutput | None = None
    """The output of a SAMPLE, from the output rank."""
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    """The result of a CALL or POOL."""
    error_kind: WorkerErrorKind | None = None
    error: str = ""


_POLL_MS = 100
"""How often to check, while a process starts, that it still runs."""
HELLO_SECONDS: Final = 120.0
"""How long a process may take to its first message, before which it imports for half a second. A program that emptied
the folder for temporary files, where the socket is, made a start wait without end."""


def lack_of_message(
    handshake: "zmq.Socket[bytes]", exit_status: Callable[[], int | None], seconds: float = math.inf
) -> str:
    """Wait until a process that starts has sent a message. Returns why none comes, in words that go on from the
    process's name; empty: it is there.

    Args:
        exit_status: Returns that of the process; None while it runs.
        seconds: How long to wait at most.
    """
    began = time.monotonic()
    while not handshake.poll(_POLL_MS):
        if (status := exit_status()) is not None and not handshake.poll(0):
            return f"ended with status {status} while it started; see its log"
        if time.monotonic() - began > seconds:
            return (
                f"has sent nothing for {seconds:g} s since its start: the machine is overloaded, or the folder for "
                "temporary files, where its socket is, was emptied"
            )
    return ""


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
            stdin=subprocess.PIPE,
            # In a process group of its own the worker gets no Ctrl-C of a terminal. It stays in the session of its
            # core: when the core ends, the kernel sends SIGHUP and SIGCONT to stopped processes of the orphaned group.
            # In a session of its own, a stopped worker kept its memory until SIGCONT came.
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
        assert isinstance(self._receive(HELLO_SECONDS), WorkerHello)
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

    def _receive(self, seconds: float = math.inf) -> _Message:
        if lack := lack_of_message(self.socket, self._process.poll, seconds):
            raise ExecutorFailedError(f"worker {self.rank} {lack}")
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

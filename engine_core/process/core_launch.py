"""Starts and ends a core's process on behalf of its client."""

import contextlib
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

import zmq

from tokenloom.process.rendezvous_dir import RendezvousDir

from ..data.config import EngineConfig
from ..data.errors import EngineConfigError, EngineStartError
from ..data.handshake import CoreFailed, CoreHello, CoreInit, CoreReady
from ..wire.array_arena import ArenaAddress
from ..wire.frames import Decoder, encode

_POLL_MS = 100
"""How often a wait for the core checks that its process is alive."""

_SOCKETS = ("handshake", "kv")

_CoreMessage = CoreHello | CoreReady | CoreFailed
_decoder: Decoder[_CoreMessage] = Decoder(_CoreMessage)


class CoreProcess:
    """Manages a core's process, and the sockets that connect it to one client.

    The process reads its standard input only to notice the end of its parent, so it never outlives this process.

    Attributes:
        connection: This end of the socket for requests and outputs; the client closes it.
        kv_address: The ipc address for messages about KV.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """``command`` starts a core; ``--handshake ADDRESS`` is appended to it. It is a command and not a fork: a fork
        of a process with a live gRPC runtime hangs."""
        # Not multiprocessing, which pickles its arguments and imports __main__ again: the offline LLM runs in a script
        # without a guard around its calls.
        self._command = list(command)
        # Only this user can connect: its mode is 0700. When both processes are killed, a later start removes it.
        self._directory = RendezvousDir("core")
        self._process: subprocess.Popen[bytes] | None = None
        self._handshake_address, self.kv_address = (f"ipc://{self._directory.path}/{name}" for name in _SOCKETS)
        self.connection, self._core_end = socket.socketpair()

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it was spawned."""
        return self._process.pid if self._process else None

    def start(self, config: EngineConfig, arrays: ArenaAddress | None = None, pulse_fd: int | None = None) -> CoreReady:
        """Spawn the process, which inherits the memory of ``arrays`` and the descriptor of its pulse, and lead it
        through HELLO → INIT → READY. Blocks while the model loads.

        Raises ``EngineStartError`` with the core's message, or with its exit status if it sent none;
        ``EngineConfigError`` if the configuration or the checkpoint is wrong.
        """
        inherited = (self._core_end.fileno(), arrays.fd if arrays is not None else None, pulse_fd)
        with zmq.Context() as context, context.socket(zmq.PAIR) as handshake:
            handshake.linger = 0
            handshake.bind(self._handshake_address)
            # In a session of its own the process gets no Ctrl-C of the terminal: the parent decides how the core ends.
            self._process = subprocess.Popen(
                [*self._command, "--handshake", self._handshake_address],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=[fd for fd in inherited if fd is not None],
            )
            hello = self._receive(handshake)
            assert isinstance(hello, CoreHello), hello
            kv_address = self.kv_address if config.kv.transports else ""
            init = CoreInit(self._core_end.fileno(), config, kv_address, arrays, pulse_fd)
            handshake.send_multipart(encode(init))
            ready = self._receive(handshake)
            assert isinstance(ready, CoreReady), ready
            self._core_end.close()  # the core's own is the last one, so that its end is seen
            return ready

    def wait(self) -> int:
        """Block until the process has ended and return its exit status, negative for a signal."""
        assert self._process is not None
        return self._process.wait()

    def exit_status(self) -> int | None:
        """Return the exit status; None while the process runs or was never started."""
        return self._process.poll() if self._process else None

    def stop(self, grace: float) -> None:
        """Ask the process to finish its requests and exit; kill it after ``grace`` seconds. Idempotent."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(grace)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        self._core_end.close()
        self._directory.remove()

    def kill(self) -> None:
        """Kill the process. Idempotent."""
        if self._process is not None:
            self._process.kill()

    def _receive(self, handshake: zmq.Socket[bytes]) -> CoreHello | CoreReady:
        while not handshake.poll(_POLL_MS):
            if (status := self.exit_status()) is not None and not handshake.poll(0):
                raise EngineStartError(f"the engine core exited with status {status} during start-up; see its log")
        message = _decoder.decode(handshake.recv_multipart())
        if isinstance(message, CoreFailed):
            if message.permanent:
                raise EngineConfigError(message.error)
            raise EngineStartError(f"the engine core did not start: {message.error}")
        return message


def remove_sockets(handshake_address: str) -> None:
    """Remove the sockets of a core and their directory, which both sides know from the handshake's address."""
    directory = Path(handshake_address.removeprefix("ipc://")).parent
    with contextlib.suppress(OSError):
        for name in _SOCKETS:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()

"""Starting the core's process, whichever client wants it, and ending it."""

import contextlib
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import zmq

from ..config import EngineConfig
from ..errors import EngineConfigError, EngineStartError
from ..wire.array_arena import ArenaAddress
from ..wire.messages import CoreFailed, CoreHello, CoreInit, CoreReady
from ..wire.serialization import Decoder, encode

_POLL_MS = 100
"""How often a wait for the core looks whether its process still lives."""

_SOCKETS = ("handshake", "input", "output", "kv")

_CoreMessage = CoreHello | CoreReady | CoreFailed
_decoder: Decoder[_CoreMessage] = Decoder(_CoreMessage)


class CoreProcess:
    """A core's process and the ipc addresses that join it to one client.

    The process reads its standard input only to learn that its parent is gone, so it never outlives this one.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """``command`` starts a core; ``--handshake ADDRESS`` is appended to it. It is a command and not a fork: a fork
        of a process with a live gRPC runtime hangs."""
        self._command = list(command)
        # mkdtemp makes it 0700: nobody else can connect. A short path: a unix socket's may have 107 bytes.
        self._directory = Path(tempfile.mkdtemp(prefix="tl-core-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._handshake_address, self.input_address, self.output_address, self.kv_address = (
            f"ipc://{self._directory}/{name}" for name in _SOCKETS
        )

    @property
    def pid(self) -> int | None:
        """Of the process, once it was spawned."""
        return self._process.pid if self._process else None

    def start(self, config: EngineConfig, arrays: ArenaAddress | None) -> CoreReady:
        """Spawns the process, which inherits the memory of ``arrays``, and leads it through HELLO → INIT → READY.
        Blocks while the model loads.

        Raises ``EngineStartError`` with the core's own words, or with the exit status when it left none;
        ``EngineConfigError`` when the configuration or the checkpoint is at fault.
        """
        with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
            socket.linger = 0
            socket.bind(self._handshake_address)
            # A session of its own: the terminal's Ctrl-C is for the parent, which decides how the core ends.
            self._process = subprocess.Popen(
                [*self._command, "--handshake", self._handshake_address],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=() if arrays is None else (arrays.fd,),
            )
            hello = self._receive(socket)
            assert isinstance(hello, CoreHello), hello
            kv_address = self.kv_address if config.kv.transports else ""
            init = CoreInit(self.input_address, self.output_address, config, kv_address, arrays)
            socket.send_multipart(encode(init))
            ready = self._receive(socket)
            assert isinstance(ready, CoreReady), ready
            return ready

    def wait(self) -> int:
        """Blocks until the process has ended; its exit status, negative for a signal."""
        assert self._process is not None
        return self._process.wait()

    def exit_status(self) -> int | None:
        """None while it runs or was never started."""
        return self._process.poll() if self._process else None

    def stop(self, grace: float) -> None:
        """Asks the process to finish what it has and go; kills it after ``grace`` seconds. Idempotent."""
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
        remove_sockets(self._handshake_address)

    def kill(self) -> None:
        """Ends the process now. Idempotent."""
        if self._process is not None:
            self._process.kill()

    def _receive(self, socket: zmq.Socket[bytes]) -> CoreHello | CoreReady:
        while not socket.poll(_POLL_MS):
            if (status := self.exit_status()) is not None and not socket.poll(0):
                raise EngineStartError(
                    f"the engine core exited with status {status} while it started; its log says why"
                )
        message = _decoder.decode(socket.recv_multipart())
        if isinstance(message, CoreFailed):
            if message.permanent:
                raise EngineConfigError(message.error)
            raise EngineStartError(f"the engine core did not start: {message.error}")
        return message


def remove_sockets(handshake_address: str) -> None:
    """Removes the sockets of a core and their directory, which both sides know by the handshake's address."""
    directory = Path(handshake_address.removeprefix("ipc://")).parent
    with contextlib.suppress(OSError):
        for name in _SOCKETS:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()

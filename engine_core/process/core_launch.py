"""Starts and ends a core's process on behalf of its client, on this machine or on a node of a Ray cluster.

On Ray the client's own child, which would be the core, stands for it: an actor has started the core on its node, and
both copy what client and core say to each other.

client ──socket──▶ RemoteCore ──TCP──▶ CoreActor ──socket──▶ core
"""

import contextlib
import hmac
import math
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
from msgspec.structs import replace

from tokenloom.process.forked_process import PYTHON_MODULE
from tokenloom.process.rendezvous_dir import RendezvousDir
from tokenloom.process.standby import WaitingChild, take_waiting_child

from ..data.config import EngineConfig
from ..data.errors import EngineConfigError, EngineStartError, WorkerLostError
from ..data.handshake import CoreFailed, CoreHello, CoreInit, CoreReady
from ..executor.worker_launch import HELLO_SECONDS, lack_of_message
from ..wire.array_arena import ArenaAddress
from ..wire.frames import Decoder, encode

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
        self._process: subprocess.Popen[bytes] | WaitingChild | None = None
        self._handshake_address, self.kv_address = (f"ipc://{self._directory.path}/{name}" for name in _SOCKETS)
        self.connection, self._core_end = socket.socketpair()

    @property
    def pid(self) -> int | None:
        """The id of the process; None before it was spawned."""
        return self._process.pid if self._process else None

    def start(
        self,
        config: EngineConfig,
        arrays: ArenaAddress | None = None,
        pulse_fd: int | None = None,
        *,
        is_placed: bool = False,
        meeting: tuple[str, bytes] | None = None,
    ) -> CoreReady:
        """Spawn the process, which inherits the memory of ``arrays`` and the descriptor of its pulse, and lead it
        through HELLO → INIT → READY. Blocks while the model loads. ``is_placed`` and ``meeting``: as of ``CoreInit``.

        Raises ``EngineStartError`` with the core's message, with its exit status if it sent none, or if it has sent
        nothing for :data:`HELLO_SECONDS`;
        ``EngineConfigError`` if the configuration or the checkpoint is wrong.
        """
        inherited = (self._core_end.fileno(), arrays.fd if arrays is not None else None, pulse_fd)
        with zmq.Context() as context, context.socket(zmq.PAIR) as handshake:
            handshake.linger = 0
            handshake.bind(self._handshake_address)
            command = [*self._command, "--handshake", self._handshake_address]
            self._process = _spawn(command, [fd for fd in inherited if fd is not None])
            hello = self._receive(handshake, HELLO_SECONDS)
            assert isinstance(hello, CoreHello), hello
            kv_address = self.kv_address if config.kv.transports else ""
            init = CoreInit(self._core_end.fileno(), config, kv_address, arrays, pulse_fd, is_placed, meeting)
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

    def _receive(self, handshake: zmq.Socket[bytes], seconds: float = math.inf) -> CoreHello | CoreReady:
        if lack := lack_of_message(handshake, self.exit_status, seconds):
            raise EngineStartError(f"the engine core {lack}")
        message = _decoder.decode(handshake.recv_multipart())
        if isinstance(message, CoreFailed):
            if message.permanent:
                raise EngineConfigError(message.error)
            raise EngineStartError(f"the engine core did not start: {message.error}")
        return message


def _spawn(command: Sequence[str], descriptors: Sequence[int]) -> subprocess.Popen[bytes] | WaitingChild:
    """Run a command that inherits these descriptors: in a child that has imported what it needs, if one waits."""
    if tuple(command[: len(PYTHON_MODULE)]) == PYTHON_MODULE and (child := take_waiting_child()) is not None:
        try:
            child.run(command, descriptors)
            return child
        except OSError:  # it was killed
            child.discard()
    # In a session of its own the process gets no Ctrl-C of the terminal: the parent decides how the core ends.
    return subprocess.Popen([*command], stdin=subprocess.PIPE, start_new_session=True, pass_fds=descriptors)


def remove_sockets(handshake_address: str) -> None:
    """Remove the sockets of a core and their directory, which both sides know from the handshake's address."""
    directory = Path(handshake_address.removeprefix("ipc://")).parent
    with contextlib.suppress(OSError):
        for name in _SOCKETS:
            (directory / name).unlink(missing_ok=True)
        directory.rmdir()


_SECRET_BYTES = 32
_COPY_BYTES = 1 << 18
_POLL_SECONDS = 0.2
"""How often to check, while the core starts, that its machine is there."""
_LAST_SECONDS = 5.0
"""How long the exit status of a core that has ended may take to arrive."""


class CoreActor:
    """Is the actor, and the parent of the core's process on its node. Ray runs one call after the other; threads of its
    own copy bytes."""

    def __init__(self) -> None:
        from ..executor.ray_cluster import node_address, open_lifeline  # here: clients import this module too

        host = node_address()
        self._lifeline = open_lifeline(host)
        self._listener = socket.create_server((host, 0))
        self._core: CoreProcess | None = None

    def place(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return host and port of the listener that is never read (:mod:`..executor.ray_cluster`), and of the one
        for the bytes."""
        return self._lifeline.getsockname(), self._listener.getsockname()

    def start(
        self, command: Sequence[str], config: bytes, secret: bytes, meeting: tuple[str, bytes] | None
    ) -> list[bytes]:
        """Start the core with the arguments of ``command``, and wait for a client that begins with ``secret``.

        Args:
            config: An ``EngineConfig`` in msgpack.
            meeting: As in ``CoreInit``.

        Returns the frames of ``CoreReady`` or ``CoreFailed``.
        """
        self._core = core = CoreProcess([sys.executable, *command[1:]])
        try:
            decoded = msgspec.msgpack.decode(config, type=EngineConfig)
            ready = core.start(decoded, is_placed=True, meeting=meeting)
        except EngineStartError as error:
            core.stop(0.0)
            failed = CoreFailed(str(error), permanent=isinstance(error, EngineConfigError))
            return [bytes(frame) for frame in encode(failed)]
        threading.Thread(target=self._serve, args=(core, secret), name="core-client", daemon=True).start()
        return [bytes(frame) for frame in encode(ready)]

    def stop(self) -> None:
        """Ask the core to finish its requests and exit, and wait for that."""
        if self._core is not None:
            self._core.stop(math.inf)

    def status(self) -> int:
        """Wait for the end of the core and return its exit status."""
        assert self._core is not None, "start comes first"
        return self._core.wait()

    def _serve(self, core: "CoreProcess", secret: bytes) -> None:
        connection = _accept(self._listener, secret)
        outputs = threading.Thread(target=_copy, args=(core.connection, connection), name="core-outputs", daemon=True)
        outputs.start()
        _copy(connection, core.connection)
        core.kill()  # its engine has ended


def _accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """Return the first connection that begins with the secret; others end."""
    while True:
        connection, _ = listener.accept()
        connection.settimeout(_LAST_SECONDS)
        with contextlib.suppress(OSError):
            given = b""
            while len(given) < len(secret) and (more := connection.recv(len(secret) - len(given))):
                given += more
            if hmac.compare_digest(given, secret):
                listener.close()
                connection.settimeout(None)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
        connection.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the source ends or the target is gone, then end the target."""
    with contextlib.suppress(OSError):
        while data := source.recv(_COPY_BYTES):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


class RemoteCore:
    """Stands for a core in an actor of a Ray cluster, in the process of which the client is the parent. Ray ends the
    actor, and the actor the core, when this process ends."""

    def __init__(self, config: EngineConfig) -> None:
        """Make the actor, as soon as the cluster has room for it.

        Raises ``ValueError`` for a configuration that does not work, or without Ray or a cluster;
        ``ExecutorFailedError`` if the cluster has no room.
        """
        from ..executor.ray_cluster import connect, gpus_of_worker, reserve

        config.check_core_place()
        self._ray = connect("data_parallel_backend")
        gpus = 0
        if config.parallel.distributed_executor_backend != "ray":  # whose workers have bundles of their own
            gpus = gpus_of_worker(config, self._ray.cluster_resources()) * config.parallel.world_size
        # The cores of this machine, to which the mesh may have bound the worker, say nothing about the node.
        worker = replace(config.worker, cpus=(), device="cuda" if gpus else config.worker.device, place_on_host=0)
        # The GPUs are the core's alone, however many engines this machine has.
        cache = replace(config.cache, engines_on_host=1) if gpus else config.cache
        self._config = replace(config, worker=worker, cache=cache)
        self._group = reserve(self._ray, 1, gpus, what="core of an engine")
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(self._group)
        actor = self._ray.remote(CoreActor)
        self._actor = actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy).remote()
        self._is_lost = threading.Event()
        self._connection = socket.socket()

    @property
    def host(self) -> str:
        """Return the address of this machine, at which the others of the cluster reach it."""
        address: str = self._ray.util.get_node_ip_address()
        return address

    def start(self, command: Sequence[str], meeting: tuple[str, bytes] | None = None) -> list[bytes]:
        """Start the core and connect to it. ``meeting``: as in ``CoreInit``. Returns the frames of ``CoreReady`` or
        ``CoreFailed``.

        Raises ``WorkerLostError`` if its machine is lost.
        """
        from ..executor.ray_cluster import WorkerLiveness

        lifeline, address = self._get(self._actor.place.remote())
        self._liveness = WorkerLiveness([lifeline], lambda _: self._lose())
        secret = secrets.token_bytes(_SECRET_BYTES)
        config = msgspec.msgpack.encode(self._config)
        answer: list[bytes] = self._get(self._actor.start.remote(list(command), config, secret, meeting))
        if isinstance(_decoder.decode(answer), CoreReady):
            self._connection.connect(address)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection.sendall(secret)
        return answer

    def relay(self, client: socket.socket) -> int:
        """Copy between client and core until the core has ended; return its exit status, 1 if it is lost."""
        threading.Thread(target=_copy, args=(client, self._connection), name="core-client", daemon=True).start()
        _copy(self._connection, client)
        if self._is_lost.is_set():
            return 1
        try:
            status: int = self._ray.get(self._actor.status.remote(), timeout=_LAST_SECONDS)
        except self._ray.exceptions.RayError:
            return 1
        return status if status >= 0 else 1

    def stop(self) -> None:
        """Ask the core to finish its requests and exit; :meth:`relay` returns when it has."""
        self._actor.stop.remote()

    def _get(self, answer: Any) -> Any:
        while not self._ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            if self._is_lost.is_set():
                raise WorkerLostError("the core's actor on Ray ended, or its machine is lost")
        try:
            return self._ray.get(answer)
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(f"the core's actor on Ray failed: {error}") from None

    def _lose(self) -> None:
        self._is_lost.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

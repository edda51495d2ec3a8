"""Runs the process of a part: leader of its process group, killed by the kernel when the supervisor ends.

The first process of each part is a fork of this one. Later ones are forks of a standby, if there is one that has
imported what the part needs, and are started anew otherwise.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from tokenloom.process import launch
from tokenloom.process.forked_process import PYTHON_MODULE, ForkedProcess, can_fork, fork_part
from tokenloom.process.memory import available_memory, forget_start
from tokenloom.process.process_guard import is_stopped
from tokenloom.process.standby import NUMBER, READY, fork_standby, make_waiting_child, send_request, taking_orphans
from tokenloom.process.uncollected_imports import uncollected_imports

from .decided import WITHHELD
from .output import LineCopier
from .part_spec import PartSpec
from .process_tree import children

_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # Parts fork only to exec; with fork support gRPC logs a line at each fork.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_DEFAULTS = {
    # gRPC's event engine passes each event between two threads, which adds 0.8 ms to the TTFT.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener,-event_engine_callback_cq",
}
"""Defaults that the user's environment overrides."""


class Process:
    """Holds a started part. Ctrl-C does not reach it, so that the supervisor decides the order of stopping."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, spec: PartSpec, output: LineCopier) -> "Process":
        """Start the part's command; its output goes to `output`."""
        # The launcher has the kernel kill the part with the supervisor and then executes the command; isolated and
        # without site packages it takes the least time to start.
        launcher = (sys.executable, "-I", "-S", launch.__file__, str(os.getpid()))
        descriptor = output.open(spec.name)
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=_environment(spec),
                process_group=0,
                pass_fds=spec.descriptors,
            )
        finally:
            os.close(descriptor)
        return cls(process)

    @classmethod
    def fork(cls, spec: PartSpec, output: int) -> "Process":
        """Run the part's module in a fork; its output goes to the descriptor `output`. Raises `OSError`."""
        prepare = make_waiting_child if _has_child(spec) else _nothing
        return cls(fork_part(spec.command, _environment(spec), output, spec.descriptors, prepare))

    async def wait(self) -> int:
        """Wait for the end and return the exit status; negative: the signal that ended the process."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the part to drain. Only the leader gets the signal; it stops the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the part and the processes of its group. Others that it started, in sessions of their own, notice its
        end, a helper once it has done what it does."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


def _has_child(spec: PartSpec) -> bool:
    """Return whether a fork of this part gets a child that becomes a core: it has imported what the part has."""
    return spec.service == "engine"


def _nothing() -> None:
    """Prepare a part that needs nothing more."""


def _environment(spec: PartSpec) -> dict[str, str]:
    withheld = WITHHELD | spec.withheld
    inherited = {name: value for name, value in os.environ.items() if name not in withheld}
    threads = {} if spec.service in ("engine", "encoder") else _ONE_THREAD
    return {**_DEFAULTS, **threads, **inherited, **_ENVIRONMENT, **spec.environment}


_STANDBY_ROOM = 1 << 30
"""A standby of engines takes 100 MB beside what it shares with them; with less free memory than this, the model needs
it."""
_IMPORT_SECONDS, _ANSWER_SECONDS = 120.0, 30.0
"""How long a standby may take to import, and to fork a part, on a machine that is busy."""
_LOOK_SECONDS = 1.0
"""How often to look whether it is stopped, so that it never answers."""


class StandbyLost(Exception):
    """A standby forks no more parts; the message says why."""


class Standby:
    """Holds the supervisor's end of a standby (:mod:`tokenloom.process.standby`)."""

    def __init__(self, name: str, pid: int, connection: socket.socket) -> None:
        """``name``: in the log."""
        self.name = name
        self._pid = pid
        self._connection = connection
        self._connection.setblocking(False)
        self._is_ready = False
        self._becoming_ready = asyncio.Lock()

    async def ready(self) -> None:
        """Return when it has imported everything. Raises :class:`StandbyLost`."""
        async with self._becoming_ready:
            if not self._is_ready:
                self._is_ready = await self._answer(_IMPORT_SECONDS) == READY

    async def fork(self, spec: PartSpec, output: int) -> Process:
        """Return a process of a part, which is a child of this one. ``output``: as of :meth:`Process.fork`. One call
        at a time, after :meth:`ready`.

        Raises :class:`StandbyLost`, and ``OSError`` if the system makes no process or has no descriptor for it.
        """
        descriptors = {number: number for number in spec.descriptors}
        go, gone = os.pipe()
        try:
            with taking_orphans():
                has_child = _has_child(spec)
                streams = {0: go, 1: output}
                environment = _environment(spec)
                try:
                    request = (spec.command, environment, streams | descriptors)
                    send_request(self._connection, *request, has_child=has_child)
                except (ConnectionError, BlockingIOError) as error:
                    raise StandbyLost(_why(error)) from None
                pid = await self._answer(_ANSWER_SECONDS)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            _check_child(pid)
            with contextlib.suppress(OSError):  # it does the same: whichever is first
                os.setpgid(pid, pid)
            os.write(gone, b"\0")  # until here it waits, and ends if this process gives it up
            return Process(ForkedProcess(pid))
        finally:
            os.close(go)
            os.close(gone)

    async def _answer(self, seconds: float) -> int:
        until = asyncio.get_running_loop().time() + seconds
        while (data := self._received()) is None:  # before the clock: this process may have been stopped meanwhile
            if asyncio.get_running_loop().time() > until:
                raise StandbyLost(f"it has not answered for {seconds:g} s")
            await _readable(self._connection, _LOOK_SECONDS)
            if is_stopped(self._pid):
                raise StandbyLost("it is stopped")
        if len(data) != NUMBER.size:
            raise StandbyLost("it has ended")
        return int(NUMBER.unpack(data)[0])

    def _received(self) -> bytes | None:
        """Return the answer, empty if it has ended; None: there is none yet."""
        try:
            return self._connection.recv(NUMBER.size)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StandbyLost(_why(error)) from None

    def close(self) -> None:
        """End it. Idempotent."""
        if self._connection.fileno() >= 0:
            self._connection.close()
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)


async def _readable(connection: socket.socket, seconds: float) -> None:
    """Return when there is something to read, or after so many seconds."""
    # Not sock_recv, which loses what it has read if the time is over at the same moment.
    loop = asyncio.get_running_loop()
    readable, descriptor = asyncio.Event(), connection.fileno()
    loop.add_reader(descriptor, readable.set)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(readable.wait(), seconds)
    finally:
        loop.remove_reader(descriptor)


def _why(error: OSError) -> str:
    return "it has ended" if isinstance(error, ConnectionError) else f"it cannot be asked ({error.strerror})"


def _check_child(pid: int) -> None:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        raise StandbyLost("the system gives this process no orphans") from None


class Starter:
    """Starts processes of parts: forks of a standby, or new ones."""

    def __init__(self, output: LineCopier, standbys: Mapping[str, Standby] = {}) -> None:
        """``standbys``: by the services of which they fork parts."""
        self._output = output
        self._standbys = dict(standbys)
        self._starting = asyncio.Lock()  # so that a child that is not known by then is an orphan
        self._orphans: set[int] = set()

    async def ready(self, spec: PartSpec) -> None:
        """Return when nothing delays the start of a part. It may be cancelled."""
        if (standby := self._standbys.get(spec.service)) is not None:
            try:
                await standby.ready()
            except StandbyLost as error:
                self._lose(standby, error)

    async def start(self, spec: PartSpec) -> Process:
        """Start the process of a part. Raises ``OSError`` if the system makes none."""
        await self.ready(spec)
        standby = None
        try:
            async with self._starting:
                self._reap()
                standby = self._standbys.get(spec.service)  # now: the start before this one may have lost it
                if standby is None or spec.command[: len(PYTHON_MODULE)] != PYTHON_MODULE:
                    return await Process.start(spec, self._output)
                return await self._fork(standby, spec)
        except StandbyLost as error:
            assert standby is not None
            self._lose(standby, error)
        return await self.start(spec)

    async def _fork(self, standby: Standby, spec: PartSpec) -> Process:
        before, supervisor = set(children(os.getpid())), os.getpid()
        output, own = self._output.open(spec.name), set[int]()
        try:
            process = await standby.fork(spec, output)
            own.add(process.pid)
            return process
        finally:
            os.close(output)
            # Other processes whose parents have ended at the same moment are this process's children now; so is a part
            # that was given up, and ends.
            self._orphans |= set(children(supervisor)) - before - own

    def _reap(self) -> None:
        for pid in [*self._orphans]:
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    continue
            self._orphans.discard(pid)

    def _lose(self, standby: Standby, error: StandbyLost) -> None:
        services = [service for service, each in self._standbys.items() if each is standby]
        for service in services:
            del self._standbys[service]
        if services:
            self._output.say(
                standby.name, f"{error}; processes of {' and '.join(services)} are started anew from now on"
            )
        standby.close()

    def close(self) -> None:
        """End the standbys."""
        for standby in set(self._standbys.values()):
            standby.close()
        self._reap()


_SHARED = (
    "tokenloom.services.runtime.host.service",
    "tokenloom.services.runtime.registry.registry_view",
    "tokenloom.services.runtime.streams.slotted_stream",
    "tokenloom.model_files.checkpoint",
    "tokenloom.request.output_constraints",
    "tokenloom.v1.engine_pb2_grpc",
    "numpy",
)
"""What several parts import. The first is most of what a coordinator imports."""
_OF_ENGINES = (
    "tokenloom.services.engine.service",
    "tokenloom.services.engine.core.workers",
    "tokenloom.engine_core.process.core_process",
    "tokenloom.engine_core.executor.make_executor",
    "tokenloom.gpu_worker.devices",
)
"""What an engine, its core and its worker import besides. The last is torch and the models."""
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Else numpy starts a thread for each further core, which waits for products of matrices that only an engine computes,
in its core."""


def fork_first(
    specs: Sequence[PartSpec], output: LineCopier, *, has_standby: bool = False
) -> tuple[dict[str, Process], Starter]:
    """Return a process for each part by the part's name, without those that have to be started in the ordinary way,
    and what starts further ones. ``has_standby``: whether a standby of their own makes the processes of engines."""
    if not can_fork():
        return {}, Starter(output)
    import_shared()
    processes: dict[str, Process] = {}
    pipes: dict[str, int] = {}
    if has_standby and (room := available_memory()) < _STANDBY_ROOM:
        text = f"{room >> 20} MiB of memory are free, of {_STANDBY_ROOM >> 20} that it takes: there is none for engines"
        output.say("standby-1", text)
        has_standby = False
    of_engines = _fork_standby("standby-1", _OF_ENGINES, ("engine",), pipes) if has_standby else {}
    # Engines take longest to start.
    for spec in sorted((each.first for each in specs), key=lambda spec: spec.service != "engine"):
        if spec.command[: len(PYTHON_MODULE)] == PYTHON_MODULE and spec.service not in of_engines:
            _fork(spec, processes, pipes)
    # It imports nothing more: it costs a few pages, and what a service imports besides takes a tenth of a second.
    services = sorted({spec.service for spec in specs} - of_engines.keys())
    standbys = of_engines | _fork_standby("standby-0", (), services, pipes)
    for name, pipe in pipes.items():  # last, because it starts threads
        output.follow(name, pipe)
    return processes, Starter(output, standbys)


def _fork_standby(
    name: str, modules: Sequence[str], services: Sequence[str], pipes: dict[str, int]
) -> dict[str, Standby]:
    read_end, write_end = os.pipe()
    try:
        pid, connection = fork_standby(modules, write_end)
    except OSError:  # their parts are started in the ordinary way
        os.close(read_end)
        return {}
    finally:
        os.close(write_end)
    pipes[name] = read_end
    return dict.fromkeys(services, Standby(name, pid, connection))


def import_shared() -> None:
    """Import what the parts share, without starting a thread."""
    # Imported here once: of five processes each spent a quarter of a second of CPU on it. A second start of the demo
    # mesh took 4.2 instead of 7.7 s of CPU until the first chat was answered. The pages of these modules are shared.
    with uncollected_imports(), _variables(_ONE_THREAD):
        for name in _SHARED:
            import_module(name)
    forget_start()


@contextlib.contextmanager
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _fork(spec: PartSpec, processes: dict[str, Process], pipes: dict[str, int]) -> None:
    read_end, write_end = os.pipe()
    try:
        processes[spec.name] = Process.fork(spec, write_end)
        pipes[spec.name] = read_end
    except OSError:  # such as a limit of processes; the ordinary start reports it
        os.close(read_end)
    finally:
        os.close(write_end)

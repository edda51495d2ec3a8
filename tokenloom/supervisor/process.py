"""Runs the process of a part: leader of its process group, killed by the kernel when the supervisor ends.

The first process of each part is a fork of this one; later processes of a part are started anew.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module

from tokenloom.process import launch
from tokenloom.process.forked_process import PYTHON_MODULE, ForkedProcess, can_fork, fork_part
from tokenloom.process.memory import forget_start
from tokenloom.process.uncollected_imports import uncollected_imports

from .decided import WITHHELD
from .output import LineCopier
from .part_spec import PartSpec

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
        return cls(fork_part(spec.command, _environment(spec), output, spec.descriptors))

    async def wait(self) -> int:
        """Wait for the end and return the exit status; negative: the signal that ended the process."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the part to drain. Only the leader gets the signal; it stops the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Kill the part and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)


def _environment(spec: PartSpec) -> dict[str, str]:
    withheld = WITHHELD | spec.withheld
    inherited = {name: value for name, value in os.environ.items() if name not in withheld}
    threads = {} if spec.service in ("engine", "encoder") else _ONE_THREAD
    return {**_DEFAULTS, **threads, **inherited, **_ENVIRONMENT, **spec.environment}


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
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
"""Else numpy starts a thread for each further core, which waits for products of matrices that only an engine computes,
in its core."""


def fork_first(specs: Sequence[PartSpec], output: LineCopier) -> dict[str, Process]:
    """Return a process for each part by the part's name, without those that have to be started in the ordinary way."""
    if not can_fork():
        return {}
    import_shared()
    processes: dict[str, Process] = {}
    pipes: dict[str, int] = {}
    # Engines take longest to start.
    for spec in sorted((each.first for each in specs), key=lambda spec: spec.service != "engine"):
        if spec.command[: len(PYTHON_MODULE)] == PYTHON_MODULE:
            _fork(spec, processes, pipes)
    for name, pipe in pipes.items():  # last, because it starts threads
        output.follow(name, pipe)
    return processes


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

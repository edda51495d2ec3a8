"""A part's process: leader of its own process group, killed by the kernel when the supervisor goes."""

import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from .output import LineCopier
from .part_spec import PartSpec

_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    # Parts fork only to exec; without it gRPC prints a line at each.
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
_DEFAULTS = {
    # gRPC's event engine hands each event from a thread of its own to the one that polls: 0.8 ms more to a first token.
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener,-event_engine_callback_cq",
}
"""Unless the user's environment says otherwise."""
_LAUNCH = str(Path(__file__).with_name("launch.py"))


class Process:
    """A started part. A terminal's Ctrl-C does not reach it, so the supervisor alone decides the order of the end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, spec: PartSpec, output: LineCopier) -> "Process":
        """Starts the part's command; everything it prints goes to `output`."""
        cpus = ",".join(map(str, spec.cpus))
        launcher = (sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), cpus)
        descriptor = output.open(spec.name)
        try:
            process = await asyncio.create_subprocess_exec(
                *launcher,
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env={**_DEFAULTS, **os.environ, **_ENVIRONMENT, **spec.environment},
                process_group=0,
            )
        finally:
            os.close(descriptor)
        return cls(process)

    async def wait(self) -> int:
        """The exit status; negative: the signal that ended it."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Asks the part to drain. Only the leader hears it: what it started is its own to stop."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def kill_group(self) -> None:
        """Ends the part and all that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self.pid, signal.SIGKILL)

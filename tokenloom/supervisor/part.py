"""Keeps one part running: starts it, follows its health, starts it again when it ends."""

import asyncio
import contextlib
import signal

from . import part_health
from .output import LineCopier
from .part_spec import PartSpec
from .process import Process
from .state_dir import PartState, read_part_state

FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
"""Seconds between a death and the next start: doubled at each, back to the first after a life of `STABLE_SECONDS`."""
STABLE_SECONDS = 10.0
START_ATTEMPTS = 3
"""A part that never served is given up after so many deaths."""
USAGE_ERROR = 2
"""Exit status for bad settings: another start would end the same way."""
_POLL_SECONDS = 0.05


class PartFailed(Exception):
    """A part cannot be brought up; the message says which and how it ended."""


class Part:
    """A part and its restarts. :meth:`keep` owns the process; the other methods only ask."""

    def __init__(self, spec: PartSpec, output: LineCopier) -> None:
        self.spec = spec
        self.state: PartState | None = None
        """What the running process said of itself once it was bound."""
        self.serving = asyncio.Event()
        self.restarts = 0
        self._output = output
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._ever_served = False

    async def keep(self) -> None:
        """Runs until :meth:`stop` or :meth:`kill`. Raises `PartFailed` when the part does not come up at first."""
        backoff = FIRST_BACKOFF
        while not self._stopping.is_set():
            started = asyncio.get_running_loop().time()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            self.restarts += 1
            if not self._ever_served and (status == USAGE_ERROR or self.restarts >= START_ATTEMPTS):
                raise PartFailed(f"{self.spec.name} does not start ({describe_exit(status)})")
            if asyncio.get_running_loop().time() - started > STABLE_SECONDS:
                backoff = FIRST_BACKOFF
            self._output.say(self.spec.name, f"{describe_exit(status)}; starting again in {backoff:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    def stop(self) -> None:
        """Asks the part to drain and end, and not to come back."""
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Ends it now."""
        self._stopping.set()
        if self._process is not None:
            self._process.kill_group()

    async def _run_once(self) -> int:
        for path in (self.spec.state_file, *self.spec.leftovers):
            path.unlink(missing_ok=True)
        process = await Process.start(self.spec, self._output)
        self._process = process
        if self._stopping.is_set():  # asked while it started: there is nothing to drain
            process.kill_group()
        try:
            async with asyncio.TaskGroup() as group:
                follower = group.create_task(self._follow(process.pid))
                status = await process.wait()
                follower.cancel()
            return status
        finally:
            self._process = None
            process.kill_group()  # also what the part left behind
            self._report(False)
            self.state = None
            self.spec.state_file.unlink(missing_ok=True)

    async def _follow(self, pid: int) -> None:
        """Follows the process's health once it has written its addresses."""
        while (state := read_part_state(self.spec.state_file)) is None or state.pid != pid:  # noqa: ASYNC110 - a file tells nobody
            await asyncio.sleep(_POLL_SECONDS)
        self.state = state
        await part_health.follow(state.health, self._report)

    def _report(self, serving: bool) -> None:
        if serving:
            self.state = read_part_state(self.spec.state_file) or self.state  # it may have told more since
            self._ever_served = True
            self.serving.set()
        else:
            self.serving.clear()


def describe_exit(status: int) -> str:
    """``killed by SIGKILL`` or ``exited with status 1``."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"

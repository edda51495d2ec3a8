"""Keeps one part running: starts it, follows what it says of itself, and restarts it when it ends."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.services.runtime.addresses import CHANGED_SUFFIX, draft_of
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.tasks import first_of

from .output import LineCopier
from .part_spec import PartFailed, PartSpec
from .process import Process, Starter
from .state_dir import PartReport, read_part_state

FIRST_BACKOFF, LONGEST_BACKOFF = 0.1, 5.0
"""Seconds between an end and the next start: doubled each time; none after a run of `STABLE_SECONDS`."""
STABLE_SECONDS = 10.0
START_ATTEMPTS = 3
"""A part that never served is given up after this many starts."""
USAGE_ERROR = 2
"""Exit status for wrong settings, with which another start would fail too."""
_POLL_SECONDS = 0.05


class SupervisedPart:
    """Holds a part and its restarts. :meth:`keep` owns the process; the other methods only send signals."""

    def __init__(
        self,
        spec: PartSpec,
        output: LineCopier,
        first: Process | None = None,
        starter: Starter | None = None,
    ) -> None:
        """``first``: The first process, if it runs already. ``starter``: starts further ones; None: each is a new
        one."""
        self.spec = spec
        self._first = first
        self._starter = starter or Starter(output)
        self.state: PartReport | None = None
        """The state that the running process wrote when it began to listen."""
        self.serving = asyncio.Event()
        self.restarts = 0
        self._output = output
        self._process: Process | None = None
        self._crashed: Process | None = None  # the last one that `crash` has killed
        self._predecessors = Predecessors(spec.name, output)
        self._stopping = asyncio.Event()
        self._unserving = asyncio.Event()
        self._ever_served = False

    async def keep(self) -> None:
        """Run the part until :meth:`stop` or :meth:`kill`. Raises `PartFailed` if it never served."""
        try:
            await self._keep_running()
        finally:
            await self._predecessors.ended()

    async def _keep_running(self) -> None:
        backoff = FIRST_BACKOFF
        while not self._stopping.is_set():
            started = asyncio.get_running_loop().time()
            status: int | None = None
            try:
                status = await self._run_once()
                reason = "" if status is None else describe_exit(status)
                then = "restarting"
            except Exception as error:  # without descriptors, memory or disk: that may pass, and the others run on
                reason, then = f"could not be started ({describe(error)})", "trying again"
            if self._stopping.is_set():
                return
            self.restarts += 1
            if not reason:
                self._output.say(self.spec.name, "drains; starting its successor")
                continue
            if not self._ever_served and (status == USAGE_ERROR or self.restarts >= START_ATTEMPTS):
                raise PartFailed(f"{self.spec.name} did not start ({reason})")
            if asyncio.get_running_loop().time() - started > STABLE_SECONDS:
                self._output.say(self.spec.name, f"{reason}; {then}")
                backoff = FIRST_BACKOFF
                continue
            self._output.say(self.spec.name, f"{reason}; {then} in {backoff:.1f} s")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    def stop(self) -> None:
        """Ask the part to drain and end, and do not restart it. Idempotent: a second signal would end it at once."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the part."""
        self._stopping.set()
        self._predecessors.kill()
        if self._process is not None:
            self._process.kill_group()

    def crash(self) -> None:
        """Kill the process with all that it started, as a failure would; :meth:`keep` starts another one."""
        if self._process is not None:
            self._process.kill_group()
            self._crashed = self._process
            self._report(False)  # now, before its end is noticed: who asks whether another one serves must not count it

    async def restarted(self, restarts: int) -> None:
        """Return when the part serves again after a process that was killed when it had ``restarts``."""
        while self.restarts == restarts:  # noqa: ASYNC110 - a crash is noticed within milliseconds
            await asyncio.sleep(_POLL_SECONDS)
        await self.serving.wait()

    async def _run_once(self) -> int | None:
        """Run a process to its end, or until it drains and has left its listening sockets to a successor. Return its
        exit status; None: it drains."""
        if (process := await self._start()) is None:
            return None  # stopped before there was one
        self._process = process
        if self._stopping.is_set():  # stopped while it started: it has no requests to drain
            process.kill_group()
        status: int | None = None
        has_left = False
        try:
            async with asyncio.TaskGroup() as group:
                follower = group.create_task(self._follow(process.pid))
                ending = group.create_task(process.wait())
                leaving = group.create_task(self._until_left(process.pid))
                await asyncio.wait((ending, leaving), return_when=asyncio.FIRST_COMPLETED)
                has_left = not ending.done()
                status = None if has_left else ending.result()
                for task in (follower, ending, leaving):
                    task.cancel()
            return status
        finally:
            self._process = None
            if has_left:
                self._predecessors.add(process)
            else:
                process.kill_group()  # also the processes that the part left
                draft_of(self.spec.state_file, process.pid).unlink(missing_ok=True)  # it was killed while it wrote
            self._report(False)
            self.state = None
            self.spec.state_file.unlink(missing_ok=True)

    async def _start(self) -> Process | None:
        if (first := self._first) is not None:
            self._first = None
            return first
        for path in (self.spec.state_file, *self.spec.leftovers):
            path.unlink(missing_ok=True)
        spec = self.spec if self.restarts else self.spec.first
        await first_of(self._starter.ready(spec), self._stopping.wait())
        return None if self._stopping.is_set() else await self._starter.start(spec)

    async def _follow(self, pid: int) -> None:
        """Watch what the process says of itself. What keeps the supervisor from reading it, such as a lack of
        descriptors, is no fault of the part."""
        backoff = FIRST_BACKOFF
        while True:
            try:
                await follow(self.spec.state_file, pid, self._take)
            except Exception as error:
                self._report(False)
                reason = f"its health cannot be read ({describe(error)}); trying again in {backoff:.1f} s"
                self._output.say(self.spec.name, reason)
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LONGEST_BACKOFF)

    async def _until_left(self, pid: int) -> None:
        """Return when the process drains and accepts nothing from the sockets that it inherited."""
        while True:
            await self._unserving.wait()
            state = read_part_state(self.spec.state_file)
            if state is not None and state.pid == pid and state.leaving and not self._predecessors.is_full:
                return
            await asyncio.sleep(_POLL_SECONDS)

    def _take(self, state: PartReport) -> None:
        if self._process is self._crashed:
            return  # its file still says what it was
        self.state = state
        self._report(state.serving)

    def _report(self, serving: bool) -> None:
        if serving:
            self._unserving.clear()
            self._ever_served = True
            self.serving.set()
        else:
            self.serving.clear()
            self._unserving.set()


def describe_exit(status: int) -> str:
    """Return ``killed by SIGKILL`` or ``exited with status 1``."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # most real-time signals have no name
        return f"killed by signal {-status}"


def describe(error: BaseException) -> str:
    """Return the reason of an error in a few words; of a group that of its first error."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


MAX_PREDECESSORS = 2
"""Processes of one part that may drain at the same time. Then a successor waits for the end of the process before."""


class Predecessors:
    """Waits for processes that have left their listening sockets to the next process."""

    def __init__(self, name: str, output: LineCopier) -> None:
        """``name``: of the part, for the log."""
        self._name = name
        self._output = output
        self._ends: dict[Process, asyncio.Task[None]] = {}

    @property
    def is_full(self) -> bool:
        return len(self._ends) >= MAX_PREDECESSORS

    def add(self, process: Process) -> None:
        """Own a process until it has ended."""
        self._ends[process] = asyncio.create_task(self._wait(process), name=f"{self._name} drains")

    def kill(self) -> None:
        """Kill all of them."""
        for process in self._ends:
            process.kill_group()

    async def ended(self) -> None:
        """Return when all of them have ended."""
        if self._ends:
            await asyncio.wait(self._ends.values())

    async def _wait(self, process: Process) -> None:
        try:
            status = await process.wait()
            if status:
                self._output.say(self._name, f"the process that drained ended with status {status}")
        finally:
            process.kill_group()  # also the processes that it left
            del self._ends[process]


_LOOK_SECONDS = 5.0
"""How often the file is read without a notice: a part without a descriptor for it sends none."""
_SERVING = health_pb2.HealthCheckResponse.SERVING


async def follow(state_file: Path, pid: int, report: Callable[[PartReport], None]) -> None:
    """Report what a process writes into its state file, now and at each change, until cancelled.

    Raises ``OSError`` if the system has no descriptor for that.
    """
    # Not by calls of gRPC, whose runtime would take eight threads of the supervisor.
    with _notices(state_file) as notices:
        loop = asyncio.get_running_loop()
        while True:
            state = read_part_state(state_file)
            if state is not None and state.pid == pid:
                report(state)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await loop.sock_recv(notices, 1)


@contextlib.contextmanager
def _notices(state_file: Path) -> Iterator[socket.socket]:
    """Open the socket that gets an empty datagram whenever the state file has changed."""
    path = state_file.with_suffix(CHANGED_SUFFIX)
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.setblocking(False)
        notices.bind(str(path))
        try:
            yield notices
        finally:
            path.unlink(missing_ok=True)


async def is_serving(address: str, timeout: float = 1.0) -> bool:
    """Return whether the part is SERVING; a part that does not answer within `timeout` seconds is not."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except grpc.aio.AioRpcError:
            return False
        return bool(response.status == _SERVING)

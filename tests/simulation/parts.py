"""Parts of the mesh that can be killed, frozen, drained and started again."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.host_dependencies import HostDependencies
from tokenloom.services.runtime.host.service import Service, running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.tasks import first_of

from .network import Network
from .surroundings import surroundings
from .virtual_loop import Process

START_SECONDS = 30.0
"""A part that has not started by then never will."""

Make = Callable[[Process, HostDependencies], Service]
"""Makes the service of one process."""


class Part:
    """Runs a service as one process after another.

    Attributes:
        process: The present one; None while it is down.
        service: The service of the present process.
        frozen_seconds: How long it was frozen so far.
        failures: Why processes ended that nothing was done to.
        is_ready: The present process has started.
        is_faulty: A fault has it now.
        expects_failure: A fault makes its next process fail.
        may_stand_by: Its processes may wait for another part's end before they serve.
    """

    def __init__(
        self, network: Network, seed: int, settings: ServiceSettings, make: Make, *, may_stand_by: bool = False
    ) -> None:
        self.settings = settings
        self.may_stand_by = may_stand_by
        self.process: Process | None = None
        self.service: Any = None
        self.host: Host | None = None
        self.frozen_seconds = 0.0
        self.failures: list[str] = []
        self.is_ready = self.is_faulty = self.expects_failure = False
        self._network = network
        self._loop = network.loop
        self._seed = seed
        self._make = make
        self._num_starts = 0
        self._stop = asyncio.Event()
        self._ended = asyncio.Event()
        self._frozen_at: float | None = None

    @property
    def name(self) -> str:
        return self.settings.instance_id

    @property
    def kind(self) -> str:
        return self.settings.service

    @property
    def is_serving(self) -> bool:
        """Whether new requests may be sent to it."""
        return self.process is not None and self.is_ready and not self._stop.is_set()

    async def start(self) -> None:
        """Start a process and return when it serves, or at once if it may stand by."""
        assert self.process is None, f"{self.name} runs already"
        self.expects_failure = False
        self._num_starts += 1
        process = self.process = Process(self.name)
        self.is_ready = False
        self._stop, self._ended = asyncio.Event(), asyncio.Event()
        started: asyncio.Future[None] = self._loop.create_future()
        run = self._run(process, self._stop, started)
        self._loop.create_task(run, name=self.name, context=process.context)
        if self.may_stand_by:
            return
        async with asyncio.timeout(START_SECONDS):
            await started

    async def drain(self) -> None:
        """Send SIGTERM and return when the process has ended. One that stands by has nothing to finish."""
        if self.may_stand_by and not self.is_ready:
            self.kill()
        self._stop.set()
        await self.ended()

    async def ended(self) -> None:
        """Return when the process has ended."""
        await self._ended.wait()

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.process is not None:
            self.thaw()
            process, self.process = self.process, None
            self._network.lies.end(process)
            self._loop.kill(process)
            self._network.died(process)
            self._ended.set()

    def lie(self) -> None:
        """Let the present process say what is wrong, until it ends."""
        if self.process is not None:
            self._network.lies.begin(self.process, Random(f"lies {self._seed} {self.name}"))

    def freeze(self) -> None:
        """Send SIGSTOP."""
        if self.process is not None and self._frozen_at is None:
            self._frozen_at = self._loop.time()
            self._loop.freeze(self.process)
            self._network.froze(self.process)

    def thaw(self) -> None:
        """Send SIGCONT."""
        if self.process is not None and self._frozen_at is not None:
            self.frozen_seconds += self._loop.time() - self._frozen_at
            self._frozen_at = None
            self._loop.thaw(self.process)

    async def _run(self, process: Process, stop: asyncio.Event, started: "asyncio.Future[None]") -> None:
        random = Random(f"{self._seed} {self.name} {self._num_starts}")
        world = surroundings(self._network, process, random)
        try:
            self.service = self._make(process, world)
            async with running(self.service, self.settings, world) as self.host:
                self.is_ready = True
                started.set_result(None)
                await first_of(stop.wait(), self.host.failure.wait())
        except Exception as error:
            if not started.done() and not self.may_stand_by:
                started.set_exception(error)
            if not self.expects_failure:
                self.failures.append(f"{self.name} failed: {error!r}")
        self._exited(process)

    def _exited(self, process: Process) -> None:
        if self.process is process:
            self.process = None
            self._loop.kill(process)
            self._network.died(process)
            self._ended.set()

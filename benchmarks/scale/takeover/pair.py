"""Two coordinators at one address: the active one, and one that stands by."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenloom.services.runtime.peers.channels import open_channel

from ..coordinator_process import Coordinator
from .lease_server import LeaseServer, make_account, serving

START_SECONDS = 60.0
_LOOK_SECONDS = 0.005
_WATCH_SECONDS = 0.2


class CoordinatorEnded(Exception):
    """Raised when a coordinator has ended by itself, for example because it could not renew its Lease in time on a busy
    machine."""


@dataclass(frozen=True, slots=True)
class LeaseKind:
    """What coordinators compete for: how a process of one is run. See :class:`.Coordinator`."""

    program: Sequence[str]
    flags: Sequence[str] = ()


def file_lease(folder: Path, _: ExitStack) -> LeaseKind:
    """Compete for a lock on a file, as the coordinators of ``serve`` do."""
    return LeaseKind(("tokenloom.services.coordinator",), ("--lease", f"file:{folder}/lock"))


def kubernetes_lease(folder: Path, stack: ExitStack) -> LeaseKind:
    """Compete for a Lease of a server in this process, which answers until the stack is closed."""
    account = make_account(folder / "account")
    port = stack.enter_context(serving(LeaseServer(), account))
    return LeaseKind((f"{__package__}.leased_coordinator", str(account), str(port)))


KINDS = {"file lock": file_lease, "Lease": kubernetes_lease}


class Pair:
    """Starts one coordinator after the other, each of which stands by until the one before it is killed."""

    def __init__(self, folder: Path, address: str, metrics: Sequence[str], lease: LeaseKind) -> None:
        """``metrics``: two addresses, ``host:port``, which the coordinators use in turns."""
        self._folder = folder
        self._address = address
        self._metrics = metrics
        self._lease = lease
        self._number = 0
        self._running: list[Coordinator] = []

    async def start(self) -> None:
        """Start another one; return once it is active or stands by."""
        self._number += 1
        health = f"unix:{self._folder}/health-{self._number}"
        coordinator = Coordinator(
            self._address,
            self._metrics[self._number % 2],
            *("--health-listen", health, "--state-file", str(self._state_file)),
            *self._lease.flags,
            program=self._lease.program,
        )
        self._running.append(coordinator)
        async with open_channel(health) as channel, asyncio.timeout(START_SECONDS):
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            watch.cancel()

    def kill(self) -> None:
        """End the active one at once, as a lost node does."""
        self._running.pop(0).kill()

    def close(self) -> None:
        """End all of them."""
        while self._running:
            self.kill()

    async def watch(self) -> NoReturn:
        """Raise ``CoordinatorEnded`` when one has ended that was not killed."""
        while all(coordinator.is_running for coordinator in self._running):  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(_WATCH_SECONDS)
        raise CoordinatorEnded("a coordinator ended by itself; the machine may be too busy")

    async def listening(self) -> None:
        """Return when the one that was started last listens: it is the active one then. Raises ``TimeoutError``."""
        async with asyncio.timeout(START_SECONDS):
            while not json.loads(self._state_file.read_text())["address"]:  # noqa: ASYNC110 - a process has no event
                await asyncio.sleep(_LOOK_SECONDS)

    @property
    def _state_file(self) -> Path:
        return self._folder / f"{self._number}.json"

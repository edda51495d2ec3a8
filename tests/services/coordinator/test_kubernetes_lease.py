"""Tests who holds a Lease while pods end, freeze and lose their API server, in virtual time."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.simulation.virtual_loop import Process, VirtualLoop
from tokenloom.bench.scale.takeover.lease_server import LeaseServer
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.coordinator.lease import LEASE_SECONDS, POLL_SECONDS, KubernetesLease

NAME = "coordinator"


class Pod:
    """Competes for the lease as a coordinator does: it stops when it has lost it."""

    def __init__(self, loop: VirtualLoop, server: LeaseServer, name: str) -> None:
        self.lease = KubernetesLease(server, NAME, name)
        self.process = Process(name)
        self.is_active = False
        self.lost = ""
        self._loop = loop
        self.task = loop.create_task(self._run(), context=self.process.context)

    async def _run(self) -> None:
        await self.lease.acquire()
        self.is_active = True
        try:
            await self.lease.keep()
        except FailedPrecondition as error:
            self.lost = error.message
        self.is_active = False

    def kill(self) -> None:
        self._loop.kill(self.process)
        self.is_active = False


def simulate(test: Callable[[VirtualLoop, LeaseServer], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    try:
        loop.run(test(loop, LeaseServer()))
        assert not loop.failures
    finally:
        loop.close()


async def until(holds: Callable[[], bool], seconds: float = 10.0) -> float:
    """Return after how many seconds a condition holds."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not holds():
        assert loop.time() < began + seconds
        await asyncio.sleep(0.01)
    return loop.time() - began


@pytest.mark.parametrize("lived", [0.0, 0.39, 0.77, 5.0])
@pytest.mark.parametrize("latency", [0.0, 0.03])
def test_another_pod_takes_over_as_soon_as_the_lease_of_a_dead_one_ends(lived: float, latency: float) -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        server.seconds = latency
        first = Pod(loop, server, "a")
        await until(lambda: first.is_active)
        second, third = Pod(loop, server, "b"), Pod(loop, server, "c")
        await asyncio.sleep(lived)
        assert (second.is_active, third.is_active) == (False, False)
        first.kill()
        seen = POLL_SECONDS + 2 * latency  # so late it saw the last renewal
        latest = seen + LEASE_SECONDS + 2 * latency + 0.02
        assert await until(lambda: second.is_active or third.is_active) < latest
        await asyncio.sleep(5.0)
        assert second.is_active != third.is_active
        assert server.leases[NAME]["spec"]["leaseTransitions"] == 1

    simulate(test)


def test_of_pods_that_start_together_one_creates_the_lease() -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        pods = [Pod(loop, server, name) for name in "abc"]
        await asyncio.sleep(5.0)
        assert [pod.is_active for pod in pods].count(True) == 1

    simulate(test)


def test_a_released_lease_is_taken_at_once_and_not_kept_by_its_former_holder() -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        first = Pod(loop, server, "a")
        await until(lambda: first.is_active)
        second = Pod(loop, server, "b")
        await asyncio.sleep(1.0)
        await first.lease.release()
        assert await until(lambda: second.is_active) < 0.3
        await asyncio.sleep(3.0)
        assert (first.is_active, first.lost, second.is_active) == (False, "", True)
        await first.lease.release()
        assert server.leases[NAME]["spec"]["holderIdentity"] == "b"

    simulate(test)


def test_a_frozen_holder_learns_that_it_was_followed_before_it_does_anything_else() -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        first = Pod(loop, server, "a")
        await until(lambda: first.is_active)
        second = Pod(loop, server, "b")
        loop.freeze(first.process)
        await until(lambda: second.is_active)
        loop.thaw(first.process)
        await until(lambda: not first.is_active, 0.1)
        assert "lost" in first.lost
        await asyncio.sleep(3.0)
        assert second.is_active

    simulate(test)


def test_a_holder_stops_before_another_pod_may_follow_it() -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        cut_off = LeaseServer()
        cut_off.leases = server.leases
        first = Pod(loop, cut_off, "a")
        await until(lambda: first.is_active)
        second = Pod(loop, server, "b")
        cut_off.is_away = True
        await until(lambda: not first.is_active)
        assert not second.is_active
        assert await until(lambda: second.is_active) < 1.2

    simulate(test)


def test_a_short_outage_of_the_api_server_and_lost_answers_change_nothing() -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        first = Pod(loop, server, "a")
        await until(lambda: first.is_active)
        second = Pod(loop, server, "b")
        for fault in ("is_away", "loses_answers"):
            setattr(server, fault, True)
            await asyncio.sleep(0.9)
            setattr(server, fault, False)
            await asyncio.sleep(3.0)
            assert (first.is_active, second.is_active) == (True, False), fault

    simulate(test)


def test_a_lost_answer_to_the_first_request_does_not_shut_its_sender_out() -> None:
    async def test(loop: VirtualLoop, server: LeaseServer) -> None:
        server.loses_answers = True
        first = Pod(loop, server, "a")
        await asyncio.sleep(0.1)
        server.loses_answers = False
        assert await until(lambda: first.is_active) < 0.5

    simulate(test)

"""Tests a standby with real processes: it takes over from an active coordinator that is killed."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.services.coordinator.engines.test_engine_registry import Clock, identity, report
from tests.services.coordinator.policies import DEFAULT_POLICY
from tests.services.coordinator.snapshots import snapshot_of
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.engines.wanted_state import Predecessor
from tokenloom.services.coordinator.service import CoordinatorService, take_over
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers.channels import Channels, open_channel
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.services.runtime.registry.registry_view import RegistryView
from tokenloom.v1.coordinator_pb2 import (
    EngineEntry,
    EngineReport,
    PickRequest,
    SetAdapterRequest,
    Snapshot,
    WatchRequest,
)
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import PickId
from tokenloom.v1.types_pb2 import Adapter, EngineRole

PICK = PickRequest(role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=10, fingerprint=identity("a").fingerprint)
SECONDS = 60.0
"""How long a loaded machine may take to start a process."""


class Coordinator:
    """One of the processes that compete for a lock."""

    def __init__(self, folder: Path, number: int) -> None:
        self._folder = folder
        self._number = number
        self.health = f"unix:{folder}/health-{number}"

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start it, and enter once its health port answers SERVING. Kills it in the end if it still runs."""
        folder, number = self._folder, self._number
        flags = [
            *("--listen", f"unix:{folder}/c", "--health-listen", self.health, "--lease", f"file:{folder}/lock"),
            *("--state-file", f"{folder}/{number}.json", "--instance-id", f"c-{number}", "--metrics-listen", ""),
            *("--log-level", "warning"),
        ]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenloom.services.coordinator", *flags
        )
        try:
            async with open_channel(self.health) as channel, asyncio.timeout(SECONDS):
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                    pass
                watch.cancel()
            yield
        finally:
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()

    @property
    def state(self) -> dict[str, object]:
        return dict(json.loads((self._folder / f"{self._number}.json").read_text()))


async def snapshot(stub: CoordinatorStub, *, epoch: int = 0, engines: int = 0) -> Snapshot:
    """Return a complete snapshot of another coordinator than ``epoch``, with so many engines; time must suffice."""
    async with asyncio.timeout(SECONDS):
        while True:
            call = stub.Watch(WatchRequest(), wait_for_ready=True)
            try:
                async for seen in call:
                    if seen.complete and seen.coordinator_epoch != epoch and len(seen.engines) == engines:
                        return seen
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.02)
            finally:
                call.cancel()


async def join(stub: CoordinatorStub, name: str, **fields: object) -> "grpc.aio.StreamStreamCall[object, object]":
    """Join as an engine and return the stream once the coordinator has answered."""
    call = stub.Join(wait_for_ready=True)
    first: EngineReport = report(**fields)
    first.hello.CopyFrom(make_hello(name, 1))
    first.identity.CopyFrom(identity(name))
    await call.write(first)
    await call.read()
    return call


async def test_the_standby_of_a_killed_coordinator_is_found_at_its_address_and_counts_none_of_its_picks(
    socket_dir: Path,
) -> None:
    first, second = Coordinator(socket_dir, 1), Coordinator(socket_dir, 2)
    address = f"unix:{socket_dir}/c"
    async with first.running(), open_channel(address) as channel:
        stub = CoordinatorStub(channel)
        engine = await join(stub, "a")  # held: a call that nothing refers to is cancelled
        before = await snapshot(stub, engines=1)
        async with second.running():
            assert (first.state["address"], second.state["address"]) == (address, "")
            picked = await stub.Pick(PICK, timeout=SECONDS)

            first.process.kill()
            await first.process.wait()
            engine.cancel()
            # The other channel may not have noticed the death yet, and a call on its dead connection fails.
            async with open_channel(address) as fresh:
                engine = await join(CoordinatorStub(fresh), "a", picks_arrived=[picked.pick])
                after = await snapshot(stub, epoch=before.coordinator_epoch, engines=1)
                assert after.engines[0].score == 0
                again = await stub.Pick(PICK, timeout=SECONDS)
                assert again.pick == PickId(coordinator_epoch=after.coordinator_epoch, number=1)
                engine.cancel()
            second.process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(second.process.wait(), SECONDS) == 0


class Permission:
    """A lease that is held once the test grants it."""

    def __init__(self, *, granted: bool = False) -> None:
        self.granted = asyncio.Event()
        self.is_released = False
        if granted:
            self.granted.set()

    async def acquire(self) -> None:
        await self.granted.wait()

    async def keep(self) -> None:
        await asyncio.Event().wait()

    async def release(self) -> None:
        self.is_released = True


async def test_a_standby_follows_the_active_coordinator(socket_dir: Path) -> None:
    active, permission, predecessor = f"unix:{socket_dir}/c", Permission(), Predecessor()
    settings = CoordinatorSettings(listen=active, metrics_listen="", settle_seconds=0.0)
    held = Permission(granted=True)
    async with running(CoordinatorService(settings, held), settings), open_channel(active) as channel:
        stub = CoordinatorStub(channel)
        engine = await join(stub, "a")
        await stub.SetAdapter(SetAdapterRequest(adapter=Adapter(name="older"), unloaded=True))  # before anyone follows
        taking = asyncio.create_task(take_over(permission, Channels(), active, predecessor))
        old, kept = (Adapter(name=name, digest=name.encode()) for name in ("old", "kept"))
        for adapter, unloaded, shown in ((old, False, [old]), (kept, False, [kept, old]), (old, True, [kept])):
            await stub.SetAdapter(SetAdapterRequest(adapter=adapter, unloaded=unloaded))
            async with asyncio.timeout(SECONDS):
                while list(predecessor.adapters) != shown:  # noqa: ASYNC110 - it has no event
                    await asyncio.sleep(0)
        assert (list(predecessor.engine_ids), predecessor.unloaded, taking.done()) == (["a"], ["older", "old"], False)
        permission.granted.set()
        await taking
        engine.cancel()
    assert held.is_released


def view(**fields: object) -> RegistryView:
    shown = RegistryView()
    assert shown.take(Snapshot(**fields))  # type: ignore[arg-type]
    return shown


def test_a_view_is_complete_once_the_engines_of_the_predecessor_are_back() -> None:
    predecessor, clock = Predecessor(), Clock()
    known = [EngineEntry(identity=identity(name)) for name in "ab"]
    old, kept = (Adapter(name=name, digest=name.encode()) for name in ("old", "kept"))
    predecessor.take(view(complete=True, engines=known, adapters=[old, kept]))
    predecessor.take(view(complete=True, engines=known, adapters=[kept], unloaded_adapters=["old"]))
    predecessor.take(view(complete=False))
    registry = Registry(2, clock, policy=DEFAULT_POLICY, predecessor=predecessor)
    for name in "ab":
        registry.refresh()
        assert not snapshot_of(registry).complete
        registry.join(identity(name), report(adapters=[old]))
    registry.refresh()
    snapshot = snapshot_of(registry)
    assert (snapshot.complete, [adapter.name for adapter in snapshot.adapters]) == (True, ["kept"])

    alone = Registry(3, clock, policy=DEFAULT_POLICY, predecessor=predecessor)
    clock.now = 2.0
    alone.refresh()
    assert snapshot_of(alone).complete  # an engine that ended with the coordinator is not waited for without end

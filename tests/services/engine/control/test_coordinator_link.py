"""The engine in a real coordinator's registry."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.ready_channel import ready_channel
from tests.services.engine.peer import Peer, make_add, make_settings, running_engine
from tokenloom.model_files.checkpoint import tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import FailedPrecondition
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.runtime.host.health import LIVENESS
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import (
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_PAUSED,
    ENGINE_STATE_SERVING,
    DesiredState,
    EngineEntry,
    EngineIdentity,
    EngineReport,
    PickRequest,
    WatchRequest,
)
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import GetEngineInfoRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_BOTH, Fingerprint


class NoCommands:
    """For links whose coordinator asks for nothing but an interval; it notes which states are wanted, and refusals."""

    def __init__(self) -> None:
        self.states: list[DesiredState] = []
        self.refusals: list[str] = []

    def take_state(self, wanted: DesiredState) -> None:
        self.states.append(wanted)

    def refused(self, reason: str) -> None:
        self.refusals.append(reason)


NO_COMMANDS: Any = NoCommands()


@asynccontextmanager
async def running_coordinator(directory: Path) -> AsyncIterator[tuple[CoordinatorStub, CoordinatorService]]:
    settings = CoordinatorSettings.of(listen=f"unix:{directory}/coordinator", metrics_listen="")
    service = CoordinatorService(settings)
    async with running(service, settings) as host, ready_channel(host.address) as channel:
        yield CoordinatorStub(channel), service


async def see(stub: CoordinatorStub, condition: Callable[[list[EngineEntry]], bool]) -> list[EngineEntry]:
    """Watches until the registry's engines meet ``condition``."""
    call = stub.Watch(WatchRequest())
    try:
        async with asyncio.timeout(30):
            async for snapshot in call:
                if condition(list(snapshot.engines)):
                    return list(snapshot.engines)
    finally:
        call.cancel()
    raise AssertionError("the watch ended")


async def until_answered(admin: EngineAdminStub) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                await admin.GetEngineInfo(GetEngineInfoRequest(), wait_for_ready=True)
            except grpc.aio.AioRpcError:  # still starting
                await asyncio.sleep(0.01)
            else:
                return


async def status_of(health: health_pb2_grpc.HealthStub, name: str) -> int:
    answer: health_pb2.HealthCheckResponse = await health.Check(health_pb2.HealthCheckRequest(service=name))
    return answer.status


def is_serving(engines: list[EngineEntry]) -> bool:
    return [engine.report.state for engine in engines] == [ENGINE_STATE_SERVING]


def report_of_first() -> EngineReport:
    """The first report of an engine that serves the same name with other weights."""
    fingerprint = Fingerprint(
        model="tokenloom-demo", tokenizer=tokenizer_fingerprint(DEMO_MODEL), weights=b"w", block_size=16
    )
    identity = EngineIdentity(engine_id="a", epoch=1, address="unix:/a", num_kv_blocks=9, fingerprint=fingerprint)
    hello = make_hello("a", 1, fingerprint=fingerprint)
    return EngineReport(hello=hello, identity=identity, role=ENGINE_ROLE_BOTH, state=ENGINE_STATE_SERVING)


async def test_an_engine_joins_with_what_it_is(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, _), running_engine(settings) as host:
        (engine,) = await see(stub, is_serving)
        assert engine.identity.engine_id == "engine-0"
        assert engine.identity.epoch == host.epoch
        assert engine.identity.address == host.address
        assert engine.identity.limits.max_model_len == 2048
        assert engine.identity.num_kv_blocks == engine.report.free_kv_blocks == 600
        assert engine.report.role == ENGINE_ROLE_BOTH


async def test_load_is_reported_and_picks_are_acknowledged(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, _), running_engine(settings) as host:
        await see(stub, is_serving)
        request = PickRequest(
            fingerprint=Fingerprint(model="tokenloom-demo"), role=ENGINE_ROLE_BOTH, prompt_tokens=2, max_new_tokens=9
        )
        pick = (await stub.Pick(request)).pick
        async with Peer(host.address) as peer:
            await peer.send(make_add(1, [1, 2], 1500, pick=pick))
            # Counted as running alone: not once more for a pick that arrived.
            (engine,) = await see(stub, lambda engines: engines[0].report.running == 1 and engines[0].score == 1)
            assert engine.report.waiting == 0
            await peer.send(abort_slots=[1])
            await see(stub, lambda engines: engines[0].score == 0 and engines[0].report.free_kv_blocks == 600)


async def test_it_is_ready_once_the_coordinator_knows_it(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with AsyncExitStack() as stack:
        starting = asyncio.create_task(stack.enter_async_context(running_engine(settings)))
        channel = await stack.enter_async_context(open_channel(settings.listen))
        await until_answered(EngineAdminStub(channel))  # nothing is missing any more but the coordinator
        health = health_pb2_grpc.HealthStub(channel)
        assert await status_of(health, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        assert await status_of(health, LIVENESS) == health_pb2.HealthCheckResponse.SERVING
        assert not starting.done()
        stub, _ = await stack.enter_async_context(running_coordinator(socket_dir))
        await starting
        assert await status_of(health, "") == health_pb2.HealthCheckResponse.SERVING
        call = stub.Watch(WatchRequest())
        assert is_serving(list((await anext(aiter(call))).engines)), "known before it is ready"
        call.cancel()


async def test_it_joins_again_when_the_coordinator_comes_back(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with AsyncExitStack() as stack:
        async with running_coordinator(socket_dir):
            host = await stack.enter_async_context(running_engine(settings))
        for _ in range(2):
            async with running_coordinator(socket_dir) as (stub, _):
                (engine,) = await see(stub, is_serving)
                assert engine.identity.epoch == host.epoch


async def test_while_it_drains_it_says_so_and_then_leaves(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, _):
        async with running_engine(settings) as host:
            await see(stub, is_serving)
            peer = Peer(host.address)
            await peer.__aenter__()
            await peer.send(make_add(1, [1, 2], 400))
            await peer.read_tokens()
            draining = asyncio.create_task(
                see(stub, lambda engines: [e.report.state for e in engines] == [ENGINE_STATE_DRAINING])
            )
        await draining
        await peer.__aexit__(None, None, None)
        await see(stub, lambda engines: not engines)


async def test_the_coordinator_may_ask_it_to_leave(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator")
    async with running_coordinator(socket_dir) as (stub, service), running_engine(settings) as host:
        await see(stub, is_serving)
        service.servicer.drain("engine-0", grace=5.0)
        await see(stub, lambda engines: [e.report.state for e in engines] == [ENGINE_STATE_DRAINING])
        async with Peer(host.address) as peer:
            await peer.send(make_add(1, [1, 2]))
            received = await peer.read_until_finished([1])
            assert received.finished[1].error.reason == "TRY_ELSEWHERE"
            assert "draining" in received.finished[1].error.message


async def test_a_name_passes_on_only_when_its_holder_has_left(socket_dir: Path) -> None:
    """Another process with the name, which joined for a second, took the engine from its mesh for good."""
    common = {"coordinator": f"unix:{socket_dir}/coordinator", "instance_id": "twin"}
    newer = make_settings(socket_dir, listen=f"unix:{socket_dir}/newer", **common)
    async with AsyncExitStack() as stack:
        stub, _ = await stack.enter_async_context(running_coordinator(socket_dir))
        async with running_engine(make_settings(socket_dir, **common)) as host:
            await see(stub, is_serving)
            starting = asyncio.create_task(stack.enter_async_context(running_engine(newer)))
            channel = await stack.enter_async_context(open_channel(newer.listen))
            await until_answered(EngineAdminStub(channel))  # it has asked to join, or is about to
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await see(stub, lambda engines: [e.identity.epoch for e in engines] != [host.epoch])
            health = health_pb2_grpc.HealthStub(channel)
            assert await status_of(health, "") == health_pb2.HealthCheckResponse.NOT_SERVING
        taker = await starting
        await see(stub, lambda engines: [e.identity.epoch for e in engines] == [taker.epoch])


async def test_a_supervisor_starts_an_engine_again_under_its_name(socket_dir: Path) -> None:
    """The connection of the process before may not have ended; that one ends for good when it finds out."""
    common = {"coordinator": f"unix:{socket_dir}/coordinator", "state_file": socket_dir / "state"}
    newer = make_settings(socket_dir, listen=f"unix:{socket_dir}/newer", **common)
    async with (
        running_coordinator(socket_dir) as (stub, _),
        running_engine(make_settings(socket_dir, **common)) as older,
    ):
        await see(stub, is_serving)
        async with running_engine(newer) as host:
            await see(stub, lambda engines: [e.identity.epoch for e in engines] == [host.epoch])
            async with asyncio.timeout(30):
                failure = await older.failure.take()
        assert isinstance(failure, FailedPrecondition)
        assert "taken this one's name" in str(failure)


async def test_with_other_weights_than_the_first_engine_it_waits_aside_and_says_so(socket_dir: Path) -> None:
    settings = make_settings(socket_dir, coordinator=f"unix:{socket_dir}/coordinator", state_file=socket_dir / "state")

    def published() -> list[str]:
        return [each["kind"] for each in json.loads((socket_dir / "state").read_text())["fall_backs"]]

    async with running_coordinator(socket_dir) as (stub, _):
        first = stub.Join()
        await first.write(report_of_first())
        async with running_engine(settings) as host:
            engines = await see(stub, lambda engines: [len(e.report.fall_backs) for e in engines] == [0, 1])
            assert engines[1].report.state == ENGINE_STATE_PAUSED
            assert engines[1].report.fall_backs[0].kind == "other_weights"
            async with asyncio.timeout(30):
                while published() != ["other_weights"]:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert [each.kind for each in host.fall_backs.active] == ["other_weights"]
            first.cancel()
            await see(stub, lambda engines: is_serving(engines) and not engines[0].report.fall_backs)
            async with asyncio.timeout(30):
                while host.fall_backs.active or published():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

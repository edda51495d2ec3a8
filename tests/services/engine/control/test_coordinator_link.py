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

from tests.loop_clock import pass_time, settle
from tests.ready_channel import ready_channel
from tests.services.engine.peer import Peer, make_add, make_settings, running_engine
from tokenloom.model_files.checkpoint import tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import Aborted, FailedPrecondition
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.engines.engine_stream import to_duration
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.engine.control import coordinator_link
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.services.runtime.host.health import LIVENESS
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import (
    ENGINE_STATE_DRAINING,
    ENGINE_STATE_PAUSED,
    ENGINE_STATE_SERVING,
    DesiredState,
    EngineCommand,
    EngineEntry,
    EngineIdentity,
    EngineReport,
    JoinFacts,
    PickRequest,
    WatchRequest,
)
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import GetEngineInfoRequest
from tokenloom.v1.engine_pb2_grpc import EngineAdminStub
from tokenloom.v1.types_pb2 import ENGINE_ROLE_BOTH, ENGINE_ROLE_DECODE, Fingerprint, Hello


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


def report_of_first() -> EngineReport:
    """The first report of an engine that serves the same name with other weights."""
    fingerprint = Fingerprint(
        model="tokenloom-demo", tokenizer=tokenizer_fingerprint(DEMO_MODEL), weights=b"w", block_size=16
    )
    identity = EngineIdentity(engine_id="a", epoch=1, address="unix:/a", num_kv_blocks=9, fingerprint=fingerprint)
    hello = make_hello("a", 1, fingerprint=fingerprint)
    return EngineReport(hello=hello, identity=identity, role=ENGINE_ROLE_BOTH, state=ENGINE_STATE_SERVING)


class EndedCall:
    """A Join that the coordinator ended after its hello: writes fail at once, reading says why."""

    def __init__(self) -> None:
        self.answers = [EngineCommand(hello=make_hello("coordinator-0", 1))]
        self.num_writes = 0

    async def write(self, report: EngineReport) -> None:
        self.num_writes += 1
        if self.num_writes > 1:
            raise asyncio.InvalidStateError("RPC already finished.")

    async def read(self) -> EngineCommand:
        if self.answers:
            return self.answers.pop()
        while self.num_writes < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        raise Aborted("a newer engine has this name")

    def cancel(self) -> None:
        pass


class FakeIdentity:
    """An ``Identity`` without settings and a core."""

    def __init__(self) -> None:
        self.facts = JoinFacts()

    def hello(self) -> Hello:
        return make_hello("engine-0", 1)

    def registration(self) -> EngineIdentity:
        return EngineIdentity()


async def test_a_report_to_an_ended_stream_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    call = EndedCall()
    monkeypatch.setattr(coordinator_link, "MAX_REPORT_SECONDS", 0.01)
    link = coordinator_link.CoordinatorLink(
        open_channel("unix:/nowhere"),
        FakeIdentity(),
        LoadTracker(4, 4),
        ENGINE_ROLE_BOTH,  # type: ignore[arg-type]
        FallBacks(),
    )
    with pytest.raises(Aborted):
        await link._join(call, NO_COMMANDS)  # type: ignore[arg-type]
    assert call.num_writes > 1


class OpenCall:
    """A Join whose coordinator answers the hello with commands; it counts the reports."""

    def __init__(self, *commands: EngineCommand) -> None:
        self.answers = [EngineCommand(hello=make_hello("coordinator-0", 1)), *commands]
        self.reports: list[EngineReport] = []

    async def write(self, report: EngineReport) -> None:
        self.reports.append(report)

    async def read(self) -> EngineCommand:
        if self.answers:
            return self.answers.pop(0)
        await asyncio.Event().wait()
        raise AssertionError

    def cancel(self) -> None:
        pass


async def test_the_coordinator_decides_how_often_it_reports() -> None:
    """A role does not wait for the interval, and a coordinator that is new finds the interval of the old one."""
    load = LoadTracker(4, 4)
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(
        open_channel("unix:/nowhere"), identity, load, ENGINE_ROLE_BOTH, FallBacks()
    )
    call: Any = OpenCall(EngineCommand(report_interval=to_duration(0.2)))
    joining = asyncio.create_task(link._join(call, NO_COMMANDS))
    await settle()
    load.accepted()
    await settle()
    assert [report.waiting for report in call.reports] == [0, 1]
    load.accepted()
    pass_time(0.19)
    await settle()
    assert len(call.reports) == 2
    pass_time(0.02)
    await settle()
    assert [report.waiting for report in call.reports] == [0, 1, 2]
    load.accepted()
    link.set_role(ENGINE_ROLE_DECODE)
    await settle()
    assert (call.reports[-1].waiting, call.reports[-1].role) == (3, ENGINE_ROLE_DECODE)
    joining.cancel()
    again: Any = OpenCall()
    joining = asyncio.create_task(link._join(again, NO_COMMANDS))
    await settle()
    load.accepted()
    await settle()
    load.accepted()
    pass_time(0.1)
    await settle()
    assert len(again.reports) == 2
    joining.cancel()


async def test_more_tokens_than_a_report_holds_are_reported_as_many() -> None:
    load = LoadTracker(4, 4)
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(open_channel("unix:/nowhere"), identity, load, ENGINE_ROLE_BOTH)
    load.accepted()
    load.handed_over(1 << 33)
    assert link._report().waiting_tokens == (1 << 32) - 1


class ChannelState:
    """The state of a channel, which a test changes."""

    def __init__(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self._changed = asyncio.Event()

    def become(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def get_state(self) -> grpc.ChannelConnectivity:
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        while self._state == last:
            await self._changed.wait()


async def test_it_waits_for_a_coordinator_whose_name_cannot_be_resolved(caplog: pytest.LogCaptureFixture) -> None:
    # No name server has to be asked: a label has 63 characters at most.
    channel, identity = open_channel(f"{'a' * 64}.invalid:1"), FakeIdentity()
    link = coordinator_link.CoordinatorLink(channel, identity, LoadTracker(4, 4), ENGINE_ROLE_BOTH)  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        joining = asyncio.create_task(link.run(NO_COMMANDS))
        async with asyncio.timeout(30):
            while "joining again" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0)
    assert "invalid:1" in caplog.text, "what cannot be resolved"
    assert not joining.done()
    joining.cancel()
    await asyncio.wait([joining])
    await channel.close()


async def test_it_joins_again_as_soon_as_the_channel_is_connected() -> None:
    states = grpc.ChannelConnectivity
    channel: Any = ChannelState(states.TRANSIENT_FAILURE)
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(channel, identity, LoadTracker(4, 4), ENGINE_ROLE_BOTH, FallBacks())
    waiting = asyncio.create_task(link._wait_to_join(1.0))
    await settle()
    channel.become(states.CONNECTING)
    await settle()
    assert not waiting.done()
    channel.become(states.READY)
    await settle()
    assert waiting.done()
    refused = asyncio.create_task(link._wait_to_join(1.0))  # by a coordinator that is there
    await settle()
    pass_time(0.9)
    await settle()
    assert not refused.done()
    pass_time(0.2)
    await settle()
    assert refused.done()


async def test_an_error_of_any_kind_is_followed_by_another_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_link, "MIN_BACKOFF_SECONDS", 0.0)
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(
        open_channel("unix:/nowhere"), identity, LoadTracker(4, 4), ENGINE_ROLE_BOTH
    )
    failures = [
        OverflowError("int too big to convert"),
        failure(grpc.StatusCode.FAILED_PRECONDITION),
        failure(grpc.StatusCode.UNAVAILABLE),
        Aborted("another engine has taken this one's name"),
    ]

    async def join(*_: object) -> None:
        raise failures.pop(0)

    monkeypatch.setattr(link, "_join", join)
    monkeypatch.setattr(link, "_wait_to_join", asyncio.sleep)
    commands = NoCommands()
    with pytest.raises(FailedPrecondition, match="taken"):
        await link.run(commands)  # type: ignore[arg-type]
    assert not failures
    assert list(map(bool, commands.refusals)) == [True, False], "what does not answer refuses nothing"


async def test_an_engine_that_drains_ends_in_peace_when_its_name_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(
        open_channel("unix:/nowhere"), identity, LoadTracker(4, 4), ENGINE_ROLE_BOTH
    )
    link.set_state(ENGINE_STATE_DRAINING)

    async def join(*_: object) -> None:
        raise Aborted("another engine has taken this one's name")

    monkeypatch.setattr(link, "_join", join)
    await link.run(NO_COMMANDS)


async def test_it_joins_again_with_what_the_coordinator_gave_it() -> None:
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(
        open_channel("unix:/nowhere"), identity, LoadTracker(4, 4), ENGINE_ROLE_BOTH
    )
    commands: Any = NoCommands()
    call: Any = OpenCall(EngineCommand(desired=DesiredState(revision=8)))
    call.answers[0].incarnation = 7  # and no state: the coordinator does not know it yet
    joining = asyncio.create_task(link._join(call, commands))
    await settle()
    assert call.reports[0].join.incarnation == 0
    assert [each.revision for each in commands.states] == [8]
    joining.cancel()
    again: Any = OpenCall()
    joining = asyncio.create_task(link._join(again, commands))
    await settle()
    assert again.reports[0].join.incarnation == 7
    assert [each.revision for each in commands.states] == [8, 0], "a coordinator of an older release wants none"
    joining.cancel()


def failure(code: grpc.StatusCode) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())

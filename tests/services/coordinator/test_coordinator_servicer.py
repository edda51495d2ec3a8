"""Tests Join, Pick, PickStream and Watch over a unix socket."""

import asyncio
from collections.abc import AsyncIterator
from ctypes import PyDLL
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.loop_clock import pass_time, settle
from tests.ready_channel import ready_channel
from tokenloom.request import errors, wire_errors
from tokenloom.services.coordinator import native_placement
from tokenloom.services.coordinator.coordinator_servicer import NATIVE_ENGINES
from tokenloom.services.coordinator.coordinator_settings import CoordinatorSettings
from tokenloom.services.coordinator.engines.engine_registry import Registry
from tokenloom.services.coordinator.engines.engine_stream import to_duration
from tokenloom.services.coordinator.native_placement import use_natively
from tokenloom.services.coordinator.service import CoordinatorService
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.peers import subset
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import (
    EngineCommand,
    EngineIdentity,
    EngineRef,
    EngineReport,
    EngineState,
    EnrollRequest,
    JoinFacts,
    PickBatch,
    PickRequest,
    Position,
    SetDesiredStateRequest,
    Snapshot,
    StateProgress,
    WatchRequest,
)
from tokenloom.v1.coordinator_pb2_grpc import CoordinatorStub
from tokenloom.v1.engine_pb2 import PAUSE_MODE_KEEP, PauseRequest, ResumeRequest, SleepRequest
from tokenloom.v1.types_pb2 import EngineRole, Fingerprint, ModelLimits


class Coordinator:
    """A running coordinator and a client of it."""

    def __init__(self, service: CoordinatorService, stub: CoordinatorStub, host: Host) -> None:
        self.service = service
        self.host = host
        self.stub = stub
        self.calls: list[Any] = []

    async def join(self, name: str = "a", epoch: int = 1, **fields: Any) -> Any:
        """Opens an engine's stream and returns the call, its Hello read."""
        call = self.open(first_report(name, epoch, **fields))
        command = await call.read()
        assert command.hello.peer_id == "coordinator-0"
        return call

    def open(self, report: EngineReport) -> Any:
        call = self.stub.Join()
        self.calls.append(call)
        self.calls.append(asyncio.ensure_future(call.write(report)))
        return call

    def watch(self) -> Any:
        call = self.stub.Watch(WatchRequest())
        self.calls.append(call)
        return call

    def enroll(self, name: str, service: str = "output_processor") -> Any:
        call = self.stub.Enroll(EnrollRequest(service=service, instance_id=name))
        self.calls.append(call)
        return call

    async def pick(self) -> str:
        request = PickRequest(fingerprint=Fingerprint(model="m"), role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=3)
        return (await self.stub.Pick(request)).engine.engine_id


@pytest.fixture
async def coordinator(socket_dir: Path) -> AsyncIterator[Coordinator]:
    settings = CoordinatorSettings.of(listen=f"unix:{socket_dir}/c", metrics_listen="", settle_seconds=0.2)
    service = CoordinatorService(settings)
    async with running(service, settings) as host, ready_channel(host.address) as channel:
        client = Coordinator(service, CoordinatorStub(channel), host)
        yield client
        for call in client.calls:
            call.cancel()


def first_report(name: str, epoch: int = 1, **fields: Any) -> EngineReport:
    identity = EngineIdentity(
        engine_id=name,
        epoch=epoch,
        address=f"unix:/{name}",
        num_kv_blocks=64,
        fingerprint=Fingerprint(model="m", block_size=16),
        limits=ModelLimits(max_model_len=1024, vocab_size=9),
    )
    return EngineReport(hello=make_hello(name, epoch), identity=identity, **{**load(), **fields})


def load(**fields: Any) -> dict[str, Any]:
    values = {"role": EngineRole.ENGINE_ROLE_BOTH, "state": EngineState.ENGINE_STATE_SERVING, "free_kv_blocks": 64}
    return {**values, **fields}


async def until(watch: Any, *, names: str, **expected: int) -> Snapshot:
    """Reads snapshots until one shows these engines, with these counts."""
    async with asyncio.timeout(30):
        while True:
            snapshot = await watch.read()
            shown = {entry.identity.engine_id: entry.report for entry in snapshot.engines}
            if set(shown) == set(names) and all(
                getattr(report, key) == value for report in shown.values() for key, value in expected.items()
            ):
                return snapshot


async def status_of(call: Any) -> errors.TokenloomError:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return wire_errors.from_rpc(error)
    raise AssertionError("the stream ended without an error")


async def test_many_engines_are_compared_natively(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    used: asyncio.Future[Registry] = asyncio.get_running_loop().create_future()

    def use(registry: Registry, library: PyDLL) -> None:
        use_natively(registry, library)
        used.set_result(registry)

    monkeypatch.setattr(native_placement, "use_natively", use)
    names = {f"e{number}" for number in range(NATIVE_ENGINES)}
    for name in sorted(names)[1:]:
        await coordinator.join(name)
    assert coordinator.service.servicer is not None
    assert not coordinator.service.servicer.has_many.is_set()
    await coordinator.join(sorted(names)[0])
    registry = await asyncio.wait_for(used, 60)
    assert {await coordinator.pick() for _ in names} == names
    assert registry.prefixes.native is not None


async def test_an_engine_joins_reports_and_leaves(coordinator: Coordinator) -> None:
    watch = coordinator.watch()
    assert not (await watch.read()).engines
    call = await coordinator.join("a")
    await until(watch, names="a", running=0)
    assert await coordinator.pick() == "a"
    await call.write(EngineReport(**load(running=3)))
    await until(watch, names="a", running=3)
    await call.done_writing()
    await until(watch, names="")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await coordinator.pick()
    error = wire_errors.from_rpc(caught.value)
    assert isinstance(error, errors.Unavailable)
    assert error.retry_after


async def test_a_lost_stream_removes_the_engine(coordinator: Coordinator) -> None:
    watch = coordinator.watch()
    call = await coordinator.join("a")
    await until(watch, names="a")
    call.cancel()
    await until(watch, names="")


async def test_a_coordinator_that_stops_does_not_tell_that_the_engines_left(coordinator: Coordinator) -> None:
    joined, watch = await coordinator.join("a"), coordinator.watch()
    assert coordinator.service.servicer is not None
    coordinator.service.servicer.close()
    joined.cancel()  # as the server does to every stream
    await coordinator.join("b")
    names: set[str] = set()
    while "b" not in names:
        names = {entry.identity.engine_id for entry in (await watch.read()).engines}
    assert names == {"a", "b"}


async def test_a_name_belongs_to_its_holder(coordinator: Coordinator) -> None:
    holder = await coordinator.join("a", epoch=1, join=JoinFacts(supervisor="one"))
    refused = coordinator.open(first_report("a", epoch=2, join=JoinFacts(supervisor="two")))
    error = await status_of(refused)
    assert isinstance(error, errors.FailedPrecondition)
    assert "unix:/a" in error.message, "the holder is named"
    holder.cancel()
    await until(coordinator.watch(), names="")
    await coordinator.join("a", epoch=2, join=JoinFacts(supervisor="two"))


async def test_a_process_of_the_same_supervisor_wins_for_good(coordinator: Coordinator) -> None:
    older = coordinator.open(first_report("a", epoch=1, join=JoinFacts(supervisor="one")))
    given = (await older.read()).incarnation
    newer = coordinator.open(first_report("a", epoch=2, join=JoinFacts(supervisor="one")))
    assert (await newer.read()).incarnation > given
    assert isinstance(await status_of(older), errors.Aborted)
    again = coordinator.open(first_report("a", epoch=1, join=JoinFacts(supervisor="one", incarnation=given)))
    assert isinstance(await status_of(again), errors.Aborted), "it was overtaken, and finds out late"
    await newer.write(EngineReport(**load(running=4)))
    snapshot = await until(coordinator.watch(), names="a", running=4)
    assert snapshot.engines[0].identity.epoch == 2


async def test_an_older_join_of_the_same_process_that_comes_late_does_not_end_it(coordinator: Coordinator) -> None:
    later = coordinator.open(first_report("a", epoch=1, join=JoinFacts()))
    assert (await later.read()).incarnation
    earlier = coordinator.open(first_report("a", epoch=1, join=JoinFacts()))
    assert (await earlier.read()).incarnation
    assert isinstance(await status_of(later), errors.Unavailable), "so that it joins again"


async def test_a_wanted_state_is_sent_to_all_and_to_those_that_join(coordinator: Coordinator) -> None:
    first = await coordinator.join("a", join=JoinFacts())
    await until(coordinator.watch(), names="a", state=EngineState.ENGINE_STATE_SERVING)
    watch = coordinator.watch()
    pause = SetDesiredStateRequest(pause=PauseRequest(mode=PAUSE_MODE_KEEP), patience=to_duration(30))
    calling = asyncio.ensure_future(coordinator.stub.SetDesiredState(pause))
    while not (command := await first.read()).desired.pause_mode:
        pass
    await until(watch, names="a", state=EngineState.ENGINE_STATE_PAUSED)  # it is not paused yet, but gets no requests
    assert not calling.done()
    await first.write(EngineReport(**load(), progress=StateProgress(reached=command.desired.revision)))
    answer = await calling
    assert [(each.engine_id, each.is_done, each.cause) for each in answer.engines] == [("a", True, "")]
    second = coordinator.open(first_report("b", join=JoinFacts()))
    assert (await second.read()).desired == command.desired
    failed = StateProgress(failed=command.desired.revision, cause="a worker has failed")
    await second.write(EngineReport(**load(), progress=failed))
    answer = await coordinator.stub.SetDesiredState(SetDesiredStateRequest(resume=ResumeRequest()))
    assert [each.is_done for each in answer.engines] == [False, False], "not even asked yet"


async def test_an_engine_that_fails_to_reach_a_state_is_named_with_its_cause(coordinator: Coordinator) -> None:
    call = await coordinator.join("a", join=JoinFacts())
    other = await coordinator.join("b", join=JoinFacts())
    await until(coordinator.watch(), names="ab", state=EngineState.ENGINE_STATE_SERVING)
    sleep = SetDesiredStateRequest(sleep=SleepRequest(level=1, mode=PAUSE_MODE_KEEP), patience=to_duration(30))
    calling = asyncio.ensure_future(coordinator.stub.SetDesiredState(sleep))
    while not (command := await call.read()).desired.pause_mode:
        pass
    progress = StateProgress(failed=command.desired.revision, cause="a worker has failed")
    await call.write(EngineReport(**load(), progress=progress))
    other.cancel()
    left = "it has left; it takes the state when it joins again"
    engines = (await calling).engines
    assert [(each.is_done, each.cause) for each in engines] == [(False, progress.cause), (False, left)]
    assert all(each.follows for each in engines), "no other call is of use"
    with pytest.raises(grpc.aio.AioRpcError, match="level 1"):
        await coordinator.stub.SetDesiredState(
            SetDesiredStateRequest(sleep=SleepRequest(level=2, mode=PAUSE_MODE_KEEP))
        )


async def test_the_patience_of_a_call_counts_once(coordinator: Coordinator) -> None:
    await coordinator.join("a", join=JoinFacts())
    assert coordinator.service.servicer is not None
    servicer = coordinator.service.servicer
    servicer._complete = asyncio.Event()  # as of one that engines are still joining
    pause = SetDesiredStateRequest(pause=PauseRequest(mode=PAUSE_MODE_KEEP), patience=to_duration(30))
    calling = asyncio.ensure_future(servicer.SetDesiredState(pause, None))  # type: ignore[arg-type]
    await settle()
    pass_time(29)
    servicer._complete.set()
    await settle()
    pass_time(2)
    await settle()
    assert calling.done(), "the gateway would have given it up"
    assert [each.is_done for each in calling.result().engines] == [False]


async def test_drain_reaches_the_engine(coordinator: Coordinator) -> None:
    call = await coordinator.join("a")
    assert coordinator.service.servicer is not None
    coordinator.service.servicer.drain("a", grace=1.5)
    command: EngineCommand = await call.read()
    assert command.drain.grace.ToMilliseconds() == 1500
    with pytest.raises(errors.NotFound):
        coordinator.service.servicer.drain("b", grace=1)


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (EngineReport(), errors.FailedPrecondition),
        (first_report(""), errors.FailedPrecondition),
        (EngineReport(hello=make_hello("b", 1), identity=first_report("a").identity), errors.FailedPrecondition),
        (EngineReport(hello=make_hello("a", 9), identity=first_report("a").identity), errors.InvalidArgument),
        (first_report("a", role=EngineRole.ENGINE_ROLE_UNSPECIFIED), errors.InvalidArgument),
        (first_report("a", state=EngineState.ENGINE_STATE_UNSPECIFIED), errors.InvalidArgument),
    ],
)
async def test_a_wrong_beginning_ends_the_stream(
    coordinator: Coordinator, report: EngineReport, expected: type[errors.TokenloomError]
) -> None:
    assert isinstance(await status_of(coordinator.open(report)), expected)
    assert not (await coordinator.watch().read()).engines


async def test_a_peer_that_means_another_coordinator_is_refused(coordinator: Coordinator) -> None:
    report = first_report("a")
    report.hello.expected_peer_id = "coordinator-9"
    error = await status_of(coordinator.open(report))
    assert isinstance(error, errors.FailedPrecondition)
    assert "coordinator-9" in error.message


async def test_watch_becomes_complete(coordinator: Coordinator) -> None:
    watch = coordinator.watch()
    snapshot = await watch.read()
    async with asyncio.timeout(30):
        while not snapshot.complete:
            snapshot = await watch.read()


async def test_changes_are_coalesced(coordinator: Coordinator) -> None:
    call = await coordinator.join("a")
    watch = coordinator.watch()
    before = await until(watch, names="a")
    for running_now in range(1, 101):
        await call.write(EngineReport(**load(running=running_now)))
    num_snapshots = 0
    async with asyncio.timeout(30):
        while (snapshot := await watch.read()).engines[0].report.running < 100:
            num_snapshots += 1
    assert snapshot.revision - before.revision >= 100
    assert num_snapshots < 50


async def test_concurrent_picks_spread(coordinator: Coordinator) -> None:
    for name in "abcd":
        await coordinator.join(name)
    names = await asyncio.gather(*(coordinator.pick() for _ in range(8)))
    assert [names.count(name) for name in "abcd"] == [2, 2, 2, 2]


async def test_metrics(coordinator: Coordinator) -> None:
    await coordinator.join("a")
    await coordinator.pick()
    with pytest.raises(grpc.aio.AioRpcError):
        await coordinator.stub.Pick(PickRequest())
    value = coordinator.host.metrics.get_sample_value
    assert value("tokenloom_engines") == 1
    assert value("tokenloom_reports_read") == 0
    assert value("tokenloom_picks_total", {"outcome": "WHOLE"}) == 1
    assert value("tokenloom_picks_total", {"outcome": "INVALID_ARGUMENT"}) == 1


async def test_turns_of_sessions_are_counted_by_where_their_kv_is(coordinator: Coordinator) -> None:
    report = first_report("a", 1)
    report.identity.kv_store = b"one"
    await coordinator.open(report).read()

    async def turn(num_blocks: int, role: EngineRole = EngineRole.ENGINE_ROLE_BOTH, **fields: Any) -> str:
        request = PickRequest(
            fingerprint=Fingerprint(model="m"),
            role=role,
            prompt_tokens=16 * num_blocks,
            block_hash_prefixes=range(1, num_blocks + 1),
            session=9,
            **fields,
        )
        return str((await coordinator.stub.Pick(request)).engine.engine_id)

    assert [await turn(2), await turn(3)] == ["a", "a"]
    for name, store in (("b", b"one"), ("c", b"")):
        report = first_report(name, 1)
        report.identity.kv_store = store
        await coordinator.open(report).read()
    assert await turn(4, exclude=[EngineRef(engine_id="a", epoch=1)]) == "b"
    failed = [EngineRef(engine_id=name, epoch=1) for name in "ab"]
    assert await turn(5, exclude=failed) == "c"
    await turn(5, EngineRole.ENGINE_ROLE_DECODE)
    value = coordinator.host.metrics.get_sample_value
    counts = {kv: value("tokenloom_session_turns_total", {"kv": kv}) for kv in ("home", "store", "elsewhere")}
    assert counts == {"home": 1, "store": 1, "elsewhere": 1}, "the first turn has no past, and a decode leg is none"


async def test_picks_of_a_stream_are_counted_and_answered_in_their_order(coordinator: Coordinator) -> None:
    await coordinator.join("a")
    await coordinator.join("b")
    request = PickRequest(fingerprint=Fingerprint(model="m"), role=EngineRole.ENGINE_ROLE_BOTH, prompt_tokens=3)
    call = coordinator.stub.PickStream()
    coordinator.calls.append(call)
    assert not (await call.read()).result  # it is open
    await call.write(PickBatch(pick=[request, PickRequest(), request, request]))
    results = (await call.read()).result
    assert [result.WhichOneof("outcome") for result in results] == ["response", "error", "response", "response"]
    placed = [result.response for result in results if result.HasField("response")]
    assert {placed[0].engine.engine_id, placed[1].engine.engine_id} == {"a", "b"}  # each counts before the next
    assert [response.pick.number for response in placed] == [1, 2, 3]
    assert isinstance(wire_errors.from_proto(results[1].error), errors.InvalidArgument)
    await call.write(PickBatch(pick=[request]))
    assert (await call.read()).result[0].response.pick.number == 4


async def test_processes_of_a_service_get_positions_that_follow_who_is_there(coordinator: Coordinator) -> None:
    calls = {name: coordinator.enroll(name) for name in ("b", "a")}
    other = coordinator.enroll("a", service="gateway")
    async with asyncio.timeout(30):
        assert await other.read() == Position(index=0, count=1)
        for name, call in calls.items():
            while (position := await call.read()) != Position(index=place(name, "ab").index, count=2):
                assert position.count == 1, "the other one had not called yet"
        calls["b"].cancel()
        assert await calls["a"].read() == Position(index=0, count=1)


async def test_a_second_call_of_a_process_counts_once(coordinator: Coordinator) -> None:
    first, second = coordinator.enroll("a"), coordinator.enroll("a")
    async with asyncio.timeout(30):
        assert await first.read() == await second.read() == Position(index=0, count=1)
        first.cancel()
        third = coordinator.enroll("b")
        assert await third.read() == Position(index=place("b", "ab").index, count=2)


async def test_a_coordinator_that_stops_moves_no_process(coordinator: Coordinator) -> None:
    call = coordinator.enroll("a")
    async with asyncio.timeout(30):
        assert await call.read() == Position(index=0, count=1)
        await coordinator.service.stop()
        assert coordinator.service.servicer is not None
        replicas = coordinator.service.servicer._replicas
        changed = replicas.changed("output_processor")
        with replicas.enrolled("output_processor", "b"):
            assert not changed.is_set()


async def test_a_process_without_a_name_is_refused(coordinator: Coordinator) -> None:
    assert isinstance(await status_of(coordinator.enroll("")), errors.InvalidArgument)


def place(name: str, names: str) -> subset.ReplicaPosition:
    return subset.positions(names)[name]

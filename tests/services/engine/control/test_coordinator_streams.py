"""An engine whose stream to the coordinator ends, fails or is opened again, with fakes of the stream."""

import asyncio
from typing import Any

import grpc.aio
import pytest

from tests.loop_clock import pass_time, settle
from tests.services.engine.control.test_coordinator_link import NO_COMMANDS, NoCommands
from tokenloom.process.fall_backs import FallBacks
from tokenloom.request.errors import Aborted, FailedPrecondition
from tokenloom.services.coordinator.engines.engine_stream import to_duration
from tokenloom.services.engine.control import coordinator_link
from tokenloom.services.engine.records.load import LoadTracker
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.services.runtime.peers.hello import make_hello
from tokenloom.v1.coordinator_pb2 import (
    ENGINE_STATE_DRAINING,
    DesiredState,
    EngineCommand,
    EngineIdentity,
    EngineReport,
    JoinFacts,
)
from tokenloom.v1.types_pb2 import ENGINE_ROLE_BOTH, ENGINE_ROLE_DECODE, Hello


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


@pytest.mark.parametrize("in_first_answer", [True, False])
async def test_the_coordinator_decides_how_often_it_reports(in_first_answer: bool) -> None:
    """A role does not wait for the interval, and a coordinator that is new finds the interval of the old one."""
    load = LoadTracker(4, 4)
    identity: Any = FakeIdentity()
    link = coordinator_link.CoordinatorLink(
        open_channel("unix:/nowhere"), identity, load, ENGINE_ROLE_BOTH, FallBacks()
    )
    call: Any = OpenCall(EngineCommand(report_interval=to_duration(0.2)))
    if in_first_answer:
        hello, interval = call.answers
        hello.MergeFrom(interval)
        call.answers = [hello]
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

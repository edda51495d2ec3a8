"""Callers see what a handler raises as a gRPC status."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.ready_channel import ready_channel
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.v1 import coordinator_pb2 as pb
from tokenloom.v1 import coordinator_pb2_grpc


class Raising(coordinator_pb2_grpc.CoordinatorServicer):
    """Raises a test's error in each kind of handler; the generated class answers Join."""

    def __init__(self) -> None:
        self.error: BaseException = errors.Internal()
        self.closed = False

    async def start(self, host: Host) -> None:
        host.add_servicer(coordinator_pb2_grpc.add_CoordinatorServicer_to_server, self)

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...

    async def Pick(self, request: pb.PickRequest, context: Any) -> pb.PickResponse:
        raise self.error

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Snapshot]:
        try:
            yield pb.Snapshot(revision=1)
            raise self.error
        finally:
            self.closed = True


class Stopping(Raising):
    """Gives up, when it stops, what its calls need."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.stopped = asyncio.Event(), asyncio.Event()

    async def stop(self) -> None:
        self.stopped.set()

    async def Pick(self, request: pb.PickRequest, context: Any) -> pb.PickResponse:
        self.began.set()
        await self.stopped.wait()
        raise RuntimeError("cannot schedule new futures after shutdown")


async def test_a_call_that_the_stop_ends_is_to_be_made_elsewhere(socket_dir: Path) -> None:
    service = Stopping()
    settings = ServiceSettings.of(listen=f"unix:{socket_dir}/s", metrics_listen="")
    async with running(service, settings) as host, ready_channel(host.address) as channel:
        calling = asyncio.ensure_future(coordinator_pb2_grpc.CoordinatorStub(channel).Pick(pb.PickRequest()))
        await service.began.wait()
        host.begin_stop()
        await service.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await calling
    assert type(wire_errors.from_rpc(caught.value)) is errors.TryElsewhere


@pytest.fixture
async def raising(socket_dir: Path) -> AsyncIterator[tuple[Raising, coordinator_pb2_grpc.CoordinatorStub]]:
    service = Raising()
    async with (
        running(service, ServiceSettings.of(listen=f"unix:{socket_dir}/s", metrics_listen="")) as host,
        ready_channel(host.address) as channel,
    ):
        yield service, coordinator_pb2_grpc.CoordinatorStub(channel)


CASES = [
    (errors.InvalidArgument("top_p is wrong", "top_p"), errors.InvalidArgument),
    (errors.ResourceExhausted("full", retry_after=2.5), errors.ResourceExhausted),
    (ValueError("/etc/passwd at 0x7f"), errors.Internal),
]


def check(caught: Exception, expected: type[errors.TokenloomError]) -> None:
    assert isinstance(caught, grpc.aio.AioRpcError)
    error = wire_errors.from_rpc(caught)
    assert type(error) is expected
    assert "/etc" not in error.message
    assert error.field == ("top_p" if expected is errors.InvalidArgument else None)
    assert error.retry_after == (2.5 if expected is errors.ResourceExhausted else None)


@pytest.mark.parametrize(("error", "expected"), CASES)
async def test_unary(raising: Any, error: Exception, expected: type[errors.TokenloomError]) -> None:
    service, stub = raising
    service.error = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Pick(pb.PickRequest())
    check(caught.value, expected)


@pytest.mark.parametrize(("error", "expected"), CASES)
async def test_streams(raising: Any, error: Exception, expected: type[errors.TokenloomError]) -> None:
    service, stub = raising
    service.error = error
    call = stub.Watch(pb.WatchRequest())
    assert (await call.read()).revision == 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    check(caught.value, expected)
    assert service.closed


async def test_what_is_not_implemented(raising: Any) -> None:
    _, stub = raising
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Join(iter(())).read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_failed_call_passes_on(raising: Any) -> None:
    service, stub = raising
    service.error = errors.ModelNotFound("no model 'x'")
    with pytest.raises(grpc.aio.AioRpcError) as inner:
        await stub.Pick(pb.PickRequest())
    service.error = inner.value  # what a handler raises that called another service
    with pytest.raises(grpc.aio.AioRpcError) as outer:
        await stub.Pick(pb.PickRequest())
    error = wire_errors.from_rpc(outer.value)
    assert type(error) is errors.ModelNotFound
    assert error.message == "no model 'x'"


async def test_messages_that_are_none(socket_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Reading(Raising):
        async def Join(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            async for _ in requests:
                pass

    garbage = b"\xff" * 9
    settings = ServiceSettings.of(listen=f"unix:{socket_dir}/s", metrics_listen="")
    async with running(Reading(), settings) as host, ready_channel(host.address) as channel:
        calls: list[Any] = [
            channel.unary_unary("/tokenloom.v1.Coordinator/Pick")(garbage),
            channel.unary_stream("/tokenloom.v1.Coordinator/Watch")(garbage).read(),
            channel.stream_stream("/tokenloom.v1.Coordinator/Join")(iter([b"", garbage])).read(),
        ]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert type(wire_errors.from_rpc(caught.value)) is errors.InvalidArgument
    assert not caplog.records, "it is the caller's mistake"


class Answering(Raising):
    """Answers ``Pick`` when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answer = asyncio.Event(), asyncio.Event()

    async def Pick(self, request: pb.PickRequest, context: Any) -> pb.PickResponse:
        self.asked.set()
        await self.answer.wait()
        return pb.PickResponse()


async def test_a_client_learns_that_the_server_leaves_before_its_answer(socket_dir: Path) -> None:
    """Otherwise it would make its next call on the same connection, and gRPC cancels that call."""
    service = Answering()
    settings = ServiceSettings.of(listen=f"unix:{socket_dir}/s", metrics_listen="")
    async with asyncio.timeout(30), running(service, settings) as host, ready_channel(host.address) as channel:
        call = coordinator_pb2_grpc.CoordinatorStub(channel).Pick(pb.PickRequest())
        await service.asked.wait()
        assert channel.get_state() == grpc.ChannelConnectivity.READY
        leaving = asyncio.create_task(host.leave(30))
        await asyncio.sleep(0)
        service.answer.set()
        await call
        assert channel.get_state() != grpc.ChannelConnectivity.READY
        await leaving

"""Which calls use a local stream and which gRPC, between a real host and the channel that its peers open."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.services.runtime.local_streams.conftest import SOON
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.services.runtime.local_streams.channel import LocalCall, LocalChannel
from tokenloom.services.runtime.local_streams.server import ServerCall
from tokenloom.services.runtime.local_streams.socket_end import Kind, encode_frame
from tokenloom.services.runtime.peers.channels import Channels, open_channel
from tokenloom.v1 import coordinator_pb2 as pb
from tokenloom.v1 import coordinator_pb2_grpc


class Picking(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers picks; the generated class answers Join."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.contexts: list[Any] = []  # of Pick
        self.hold: asyncio.Event | None = None  # Pick waits for it
        self.was_cancelled = asyncio.Event()

    async def start(self, host: Host) -> None:
        self.host = host
        host.add_servicer(coordinator_pb2_grpc.add_CoordinatorServicer_to_server, self)

    async def drain(self) -> None: ...

    async def stop(self) -> None: ...

    async def Pick(self, request: pb.PickRequest, context: Any) -> pb.PickResponse:
        self.contexts.append(context)
        if self.error is not None:
            raise self.error
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.was_cancelled.set()
            raise
        return pb.PickResponse(whole_request=True)

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.Snapshot]:
        yield pb.Snapshot(revision=7)

    async def PickStream(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async for batch in requests:
            if self.error is not None:
                raise self.error
            await context.write(pb.PickResults(result=[pb.PickResult() for _ in batch.pick]))


@pytest.fixture
def settings(socket_dir: Path) -> ServiceSettings:
    return ServiceSettings.of(listen=f"unix:{socket_dir}/s", metrics_listen="")


@pytest.fixture
async def picking(settings: ServiceSettings) -> AsyncIterator[Picking]:
    service = Picking()
    async with asyncio.timeout(SOON), running(service, settings):
        yield service


BATCH = pb.PickBatch(pick=[pb.PickRequest()] * 2)


async def pick_twice(call: Any) -> None:
    await call.write(BATCH)
    assert len((await call.read()).result) == 2
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF


async def test_unary_calls_are_local_unless_they_have_options(picking: Picking, socket_dir: Path) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        for options in ({}, {"metadata": ()}, {"timeout": 5.0}, {"metadata": (("a", "b"),)}):
            assert (await stub.Pick(pb.PickRequest(), **options)).whole_request
        (socket_dir / "s.calls").unlink()
        assert (await stub.Pick(pb.PickRequest())).whole_request
    assert [isinstance(context, ServerCall) for context in picking.contexts] == [True, True, False, False, False]


async def test_a_unary_call_that_its_caller_cancels(picking: Picking) -> None:
    picking.hold = asyncio.Event()
    async with Channels().open(picking.host.address, "coordinator") as channel:
        call = asyncio.ensure_future(coordinator_pb2_grpc.CoordinatorStub(channel).Pick(pb.PickRequest()))
        while not picking.contexts:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        call.cancel()
        await picking.was_cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await call


async def test_a_unary_call_without_a_request(picking: Picking) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        assert isinstance(channel, LocalChannel)
        call = channel.open_call(encode_frame(Kind.OPEN, b"/tokenloom.v1.Coordinator/Pick"), None, None)
        assert call is not None
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match="without a request"):
            await call.read()


async def test_a_call_ends_whose_socket_the_loop_closed_while_it_opened(
    picking: Picking, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(protocol: Any, *, sock: socket.socket) -> None:
        os.close(sock.fileno())
        raise OSError

    async with Channels().open(picking.host.address, "coordinator") as channel, asyncio.timeout(SOON):
        assert isinstance(channel, LocalChannel)
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "create_unix_connection", fail)
            call = channel.open_call(encode_frame(Kind.OPEN, b"/tokenloom.v1.Coordinator/Pick"), None, None)
            assert call is not None
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_streams_are_local_and_the_rest_is_grpcs(picking: Picking) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        call = stub.PickStream()
        assert isinstance(call, LocalCall)
        await pick_twice(call)
        assert (await stub.Pick(pb.PickRequest())).whole_request
        assert [snapshot.revision async for snapshot in stub.Watch(pb.WatchRequest())] == [7]
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        await channel.channel_ready()
        assert channel.get_state() is grpc.ChannelConnectivity.READY


async def test_a_plain_grpc_client_on_the_same_address(picking: Picking) -> None:
    async with open_channel(picking.host.address) as channel:
        call = coordinator_pb2_grpc.CoordinatorStub(channel).PickStream()
        assert not isinstance(call, LocalCall)
        await pick_twice(call)


@pytest.mark.parametrize(
    "options", [{"timeout": 5.0}, {"metadata": (("a", "b"),)}, {"request_iterator": iter([BATCH])}]
)
async def test_what_a_local_stream_does_not_carry_goes_over_grpc(picking: Picking, options: dict[str, Any]) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        call = coordinator_pb2_grpc.CoordinatorStub(channel).PickStream(**options)
        assert not isinstance(call, LocalCall)
        call.cancel()


async def test_a_peer_without_local_streams(picking: Picking, socket_dir: Path) -> None:
    (socket_dir / "s.calls").unlink()
    async with Channels().open(picking.host.address, "coordinator") as channel:
        call = coordinator_pb2_grpc.CoordinatorStub(channel).PickStream()
        assert not isinstance(call, LocalCall)
        await pick_twice(call)


async def test_a_peer_that_comes_back_is_found_by_the_next_call(settings: ServiceSettings) -> None:
    async with asyncio.timeout(SOON), Channels().open(settings.listen, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.PickStream().read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for _ in range(2):
            async with running(Picking(), settings):
                call = stub.PickStream()
                await pick_twice(call)
                idle = stub.PickStream()
                await idle.write(BATCH)
                await idle.read()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await idle.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_closing_the_channel_cancels_its_calls(picking: Picking) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        calls = [coordinator_pb2_grpc.CoordinatorStub(channel).PickStream() for _ in range(2)]
        await calls[0].write(BATCH)  # the other is not connected yet
    for call in calls:
        with pytest.raises(asyncio.CancelledError):
            await call.read()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (errors.InvalidArgument("top_p is wrong", "top_p"), errors.InvalidArgument),
        (errors.ResourceExhausted("full", retry_after=2.5), errors.ResourceExhausted),
        (ValueError("/etc/passwd at 0x7f"), errors.Internal),
    ],
)
async def test_the_edge_makes_statuses_of_errors(
    picking: Picking, error: Exception, expected: type[errors.TokenloomError]
) -> None:
    picking.error = error
    async with Channels().open(picking.host.address, "coordinator") as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        call = stub.PickStream()
        await call.write(BATCH)
        for answer in (call.read(), stub.Pick(pb.PickRequest())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer
            received = wire_errors.from_rpc(caught.value)
            assert type(received) is expected
            assert "/etc" not in received.message
            assert received.field == ("top_p" if expected is errors.InvalidArgument else None)
            assert received.retry_after == (2.5 if expected is errors.ResourceExhausted else None)


async def test_a_method_left_to_the_generated_class(picking: Picking, caplog: pytest.LogCaptureFixture) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator_pb2_grpc.CoordinatorStub(channel).Join().read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_messages_that_are_none(picking: Picking, caplog: pytest.LogCaptureFixture) -> None:
    async with Channels().open(picking.host.address, "coordinator") as channel:
        call = channel.stream_stream("/tokenloom.v1.Coordinator/PickStream")()
        await call.write(b"\xff" * 9)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert type(wire_errors.from_rpc(caught.value)) is errors.InvalidArgument
    assert not caplog.records, "it is the caller's mistake"


async def test_a_part_that_is_starting_refuses(settings: ServiceSettings) -> None:
    host = Host(settings)
    await host.open()
    try:
        async with asyncio.timeout(SOON), Channels().open(host.address, "coordinator") as channel:
            call = coordinator_pb2_grpc.CoordinatorStub(channel).PickStream()
            assert isinstance(call, LocalCall)
            with pytest.raises(grpc.aio.AioRpcError, match="still starting") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await host.close(0)


async def test_an_authorized_host_asks_here_too(picking: Picking) -> None:
    def refuse(details: grpc.HandlerCallDetails) -> None:
        raise errors.Unauthenticated(f"no key for {details.method}")

    picking.host.authorize_calls(refuse)
    async with Channels().open(picking.host.address, "coordinator") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await coordinator_pb2_grpc.CoordinatorStub(channel).PickStream().read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_only_unix_sockets_have_them(socket_dir: Path) -> None:
    for address in ("127.0.0.1:1", f"unix:{socket_dir}/{'x' * 90}"):
        async with Channels().open(address, "coordinator") as channel:
            assert not isinstance(channel, LocalChannel)
    async with asyncio.timeout(SOON), running(Picking(), ServiceSettings.of(metrics_listen="")):
        assert not os.listdir(socket_dir)


async def test_a_socket_that_cannot_be_had(settings: ServiceSettings, socket_dir: Path) -> None:
    (socket_dir / "s.calls").mkdir()
    with pytest.raises(errors.Unavailable, match="cannot bind"):
        async with running(Picking(), settings):
            pass

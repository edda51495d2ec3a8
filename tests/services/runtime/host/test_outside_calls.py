"""Calls of clients from outside the mesh that say nothing end, and leave their places."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import SOON, FakeMesh
from tokenloom.request import wire_errors
from tokenloom.services.runtime.host import servicer_edge
from tokenloom.services.runtime.host.servicer_edge import MESSAGE_SECONDS, REFLECTION
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

MAX_CALLS = 4
LIST_MODELS = "/tokenloom.v1.Inference/ListModels"


@pytest.fixture
async def channel(socket_dir: Path) -> AsyncIterator[grpc.aio.Channel]:
    """To a gateway that takes few calls."""
    async with (
        FakeMesh(socket_dir).gateway(max_grpc_calls=MAX_CALLS) as mesh,
        open_channel(mesh.grpc_address) as channel,
    ):
        yield channel


def opened(channel: grpc.aio.Channel, method: str) -> Any:
    """A call whose message does not come. On the wire, a call with one message is a stream of one."""
    return channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)()


async def ended(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), SOON)
    error = wire_errors.of_exception(caught.value)
    return error.reason, error.message


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> "asyncio.Queue[None]":
    """An entry for each call that has begun to wait for its message."""
    begun: asyncio.Queue[None] = asyncio.Queue()

    def timeout(seconds: float) -> asyncio.Timeout:
        begun.put_nowait(None)
        return asyncio.timeout(seconds)

    monkeypatch.setattr(servicer_edge, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    return begun


async def list_models(channel: grpc.aio.Channel) -> grpc.StatusCode:
    stub: Any = inference_pb2_grpc.InferenceStub(channel)
    return await stub.ListModels(inference_pb2.ListModelsRequest()).code()  # type: ignore[no-any-return]


@pytest.mark.parametrize("method", [LIST_MODELS, "/tokenloom.v1.Inference/Generate", REFLECTION])
async def test_a_call_without_its_message_ends(
    channel: grpc.aio.Channel, waits: "asyncio.Queue[None]", method: str
) -> None:
    calls = [opened(channel, method) for _ in range(MAX_CALLS)]
    async with asyncio.timeout(SOON):
        for _ in calls:  # any other call before they wait could take the place of one of them
            await waits.get()
    assert await list_models(channel) is grpc.StatusCode.RESOURCE_EXHAUSTED
    pass_time(MESSAGE_SECONDS)
    for call in calls:
        reason, message = await ended(call)
        assert (reason, f"within {MESSAGE_SECONDS:g} s" in message) == ("DEADLINE_EXCEEDED", True)
    async with asyncio.timeout(SOON):  # a client learns of the end of a call before its place is free
        while await list_models(channel) is not grpc.StatusCode.OK:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_call_that_ends_without_a_message_is_an_error(channel: grpc.aio.Channel) -> None:
    call = opened(channel, LIST_MODELS)
    await call.done_writing()
    assert await ended(call) == ("INVALID_ARGUMENT", "the call has ended without a message")


async def test_watches_of_health_leave_room_for_calls(channel: grpc.aio.Channel) -> None:
    """They need no key, so anyone could take all calls of a gateway."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest()
    watch = stub.Watch(request)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    assert (await ended(stub.Watch(request)))[0] == "RESOURCE_EXHAUSTED"
    assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()
    async with asyncio.timeout(SOON):
        while True:
            again = stub.Watch(request)
            try:
                await again.read()
                break
            except grpc.aio.AioRpcError:  # the first one has not ended yet
                await asyncio.sleep(0)

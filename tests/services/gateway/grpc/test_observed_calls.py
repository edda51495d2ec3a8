"""Every end of a gRPC call is counted once, and every refusal is recorded."""

import asyncio
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.loop_clock import settle
from tests.services.gateway.fakes import FakeMesh
from tokenloom.services.runtime.peers import channels
from tokenloom.v1 import inference_pb2, inference_pb2_grpc

KEY = (("authorization", "Bearer a key"),)
ADMIN = {"authorization": "Bearer root"}
GENERATE = "/tokenloom.v1.Inference/Generate"
REQUEST = inference_pb2.GenerateRequest(text="hi")


async def counted(http: httpx.AsyncClient) -> dict[tuple[str, str, str], float]:
    """The counts by method, code and reason."""
    page = (await http.get("/metrics", headers={"authorization": "Bearer a key"})).text
    (family,) = (each for each in text_string_to_metric_families(page) if each.name == "tokenloom_grpc_responses")
    return {(s.labels["method"], s.labels["code"], s.labels["reason"]): s.value for s in family.samples}


async def test_ends_of_every_kind(socket_dir: Path) -> None:
    keys = {"api_key": ("a key",), "admin_api_key": ("root",)}
    async with (
        FakeMesh(socket_dir).gateway(**keys) as mesh,
        mesh.http() as http,
        channels.open_channel(mesh.grpc_address) as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=KEY)
        with pytest.raises(grpc.aio.AioRpcError):  # no key
            await stub.ListModels(inference_pb2.ListModelsRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/tokenloom.v1.Inference/Other")(b"", metadata=KEY)
        with pytest.raises(grpc.aio.AioRpcError):  # no key either, and a name that clients choose
            await channel.unary_unary("/some/thing")(b"")
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(aiter(channel.unary_stream(GENERATE)(b"\xff", metadata=KEY)))
        call = stub.Generate(REQUEST, metadata=KEY)
        reading = asyncio.create_task(anext(aiter(call)))
        request = await mesh.outputs.next_request()
        call.cancel()
        await request.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await settle()
        found = (await http.get("/requests", headers=ADMIN)).json()["requests"]
        list_models = "/tokenloom.v1.Inference/ListModels"
        assert await counted(http) == {
            (list_models, "OK", ""): 1,
            (list_models, "UNAUTHENTICATED", "UNAUTHENTICATED"): 1,
            ("other", "UNIMPLEMENTED", "UNIMPLEMENTED"): 1,
            ("other", "UNAUTHENTICATED", "UNAUTHENTICATED"): 1,
            (GENERATE, "INVALID_ARGUMENT", "INVALID_ARGUMENT"): 1,
            (GENERATE, "CANCELLED", "CANCELLED"): 1,
        }
    assert [(each["route"], each["status"]) for each in reversed(found)] == [
        (list_models, 401),
        ("other", 400),
        ("other", 401),
        (GENERATE, 400),
        (GENERATE, 499),
    ]
    assert [bool(each["key"]) for each in reversed(found)] == [False, True, False, True, True]

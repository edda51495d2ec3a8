"""Fronts: protocols beside the gateway's own API, built in and of plugins, come through one seam."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.plugin_packages import EXAMPLE_NAME, install, install_example
from tests.services.gateway.fakes import FakeMesh
from tokenloom.request.errors import InvalidArgument, Unavailable
from tokenloom.services.gateway.serving.fronts import GatewayCalls
from tokenloom.services.gateway.settings.gateway_settings import GatewaySettings
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.services.runtime.peers import channels
from tokenloom.v1.kserve import grpc_service_pb2, grpc_service_pb2_grpc
from tokenloom.v1.vllm import vllm_engine_pb2, vllm_engine_pb2_grpc

TGI = f"{EXAMPLE_NAME}:tgi"
PLUGGED = {"plugins": (EXAMPLE_NAME,), "fronts": ("kserve", TGI)}
KEY = {"authorization": "Bearer sesame"}
ASKED = {"inputs": "hi", "max_new_tokens": 5}
FRONTS = """
from tokenloom.services.gateway.serving.fronts import Front, GrpcService
from tokenloom.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server

async def answer(exchange):
    await exchange.respond(200, b"{}")

taken = lambda gateway: {("POST", "/v1/completions"): answer}
again = lambda gateway: {("POST", "/own"): answer}
odd = lambda gateway: {"/own": answer}
opened = lambda gateway: {("POST", "/health"): answer}
hidden = lambda gateway: {("POST", "/v1/models/own"): answer}
twice = lambda gateway: {("POST", "/v1/own/{one}"): answer, ("POST", "/v1/own/{other}"): answer}
lost = lambda gateway: {("POST", "/own/{model}/infer"): answer}
nothing = lambda gateway: None

def inner(gateway):
    async def pause(exchange):
        done = await gateway.calls.post("/pause", b"{}", exchange.tenant)
        await exchange.respond(done.status, done.body)

    return {("POST", "/own"): pause}
second = lambda gateway: Front(grpc=[GrpcService(add_InferenceServicer_to_server, InferenceServicer())])

def fails(gateway):
    raise KeyError("no model")
"""


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_example(tmp_path)
    names = ("taken", "again", "odd", "nothing", "second", "fails", "missing")
    names += ("opened", "hidden", "twice", "lost", "inner")
    install(tmp_path, "acme-fronts", {"tokenloom.fronts": {name: f"acme_fronts:{name}" for name in names}}, FRONTS)
    monkeypatch.delitem(sys.modules, "acme_fronts", raising=False)
    monkeypatch.syspath_prepend(tmp_path)


async def is_served(mesh: FakeMesh, make: Callable[[Any], Any]) -> bool:
    async with channels.open_channel(mesh.grpc_address) as channel:
        try:
            await make(channel)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return False
        return True


def live(channel: Any) -> Any:
    return grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(grpc_service_pb2.ServerLiveRequest())


def healthy(channel: Any) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel).HealthCheck(vllm_engine_pb2.HealthCheckRequest())


@pytest.mark.parametrize(
    ("settings", "served"),
    [({}, [True, True]), ({"fronts": ("kserve",)}, [True, False]), ({"fronts": ()}, [False] * 2)],
)
async def test_built_in_fronts_are_served_unless_they_are_left_out(
    socket_dir: Path, settings: dict[str, Any], served: list[bool]
) -> None:
    async with FakeMesh(socket_dir).gateway(**settings) as mesh:
        assert [await is_served(mesh, live), await is_served(mesh, healthy)] == served


def test_a_front_that_is_left_out_is_not_imported() -> None:
    code = (
        "import sys, tokenloom.services.gateway.service\n"
        "names = ('services.gateway.kserve.kserve_servicer', 'services.gateway.grpc.vllm_servicer', 'v1.kserve')\n"
        "print([name for name in names if f'tokenloom.{name}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_front_of_a_plugin_answers_by_the_gateways_own_api(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(**PLUGGED) as mesh, mesh.http() as http:
        call = asyncio.create_task(http.post("/generate", json=ASKED))
        request = await mesh.outputs.next_request()
        assert bytes(request.submit.prompt.token_ids) == b"hi"
        assert request.submit.sampling_params.max_tokens == 5
        assert not request.submit.priority, "a client waits for it: it is no line of a batch"
        request.answer("there")
        response = await call
        assert (response.status_code, response.json()) == (200, {"generated_text": "there"})
        wrong = await http.post("/generate", json={"inputs": 5})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "inputs")
        refused = await http.post("/generate", json=ASKED | {"max_new_tokens": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
        metrics = (await http.get("/metrics")).text
        for route, count in (("/generate", 1), ("/v1/completions", 1)):
            line = f'tokenloom_http_responses_total{{reason="",route="{route}",status="200"}} {count}.0'
            assert line in metrics, route


async def test_a_front_is_guarded_as_every_route_is(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["there"]
    async with mesh.gateway(**PLUGGED, api_key=("sesame",)), mesh.http() as http:
        assert (await http.post("/generate", json=ASKED)).status_code == 401
        assert (await http.post("/generate", json=ASKED, headers=KEY)).status_code == 200
        assert (await http.get("/generate", headers=KEY)).status_code == 405


async def test_a_front_does_not_reach_what_operators_do(socket_dir: Path) -> None:
    settings = {"plugins": ("acme-fronts",), "fronts": ("acme-fronts:inner",), "admin_api_key": ("admin",)}
    async with FakeMesh(socket_dir).gateway(**settings) as mesh, mesh.http() as http:
        refused = await http.post("/own")
        assert (refused.status_code, "no admin key" in refused.text) == (403, True)


async def test_the_end_of_its_client_ends_its_request(socket_dir: Path) -> None:
    async with FakeMesh(socket_dir).gateway(**PLUGGED) as mesh:
        async with httpx.AsyncClient(base_url=f"http://{mesh.http_address}") as http:
            call = asyncio.create_task(http.post("/generate", json=ASKED))
            request = await mesh.outputs.next_request()
            call.cancel()
            await asyncio.wait([call])
        await asyncio.wait_for(request.cancelled.wait(), 30)


@pytest.mark.parametrize(
    ("fronts", "reason"),
    [
        (("acme-fronts:taken",), "POST /v1/completions of acme-fronts:taken is the gateway's"),
        (("acme-fronts:again", "acme-fronts:taken"), "POST /v1/completions of acme-fronts:taken"),
        (("acme-fronts:opened",), "POST /health of acme-fronts:opened is the gateway's"),
        (("acme-fronts:hidden",), "POST /v1/models/own of acme-fronts:hidden is the gateway's"),
        (("acme-fronts:twice",), "POST /v1/own/{other} of acme-fronts:twice is acme-fronts:twice's"),
        (("acme-fronts:lost",), "/own/{model}/infer of acme-fronts:lost: parameters are the third part"),
        (("acme-fronts:odd",), r"a route '/own'; write \(METHOD, PATH\)"),
        (("acme-fronts:nothing",), "returns NoneType; a Front is needed"),
        (("acme-fronts:second",), "the gRPC service tokenloom.v1.Inference is there already"),
        (("acme-fronts:fails",), "acme-fronts:fails: KeyError: 'no model'"),
        (("acme-fronts:missing",), "cannot be loaded from acme_fronts:missing: AttributeError"),
    ],
)
async def test_a_front_that_is_none_keeps_the_gateway_from_starting(
    socket_dir: Path, fronts: tuple[str, ...], reason: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"fronts: .*{reason}") as caught:
        async with FakeMesh(socket_dir).gateway(plugins=("acme-fronts",), fronts=fronts):
            pass
    assert caught.value.field == "fronts"


def test_a_front_needs_its_package_to_be_named() -> None:
    parts = {"tokenizers": "a:1", "output_processors": "a:1", "coordinator": "a:1"}
    with pytest.raises(ValueError, match=f"fronts is {TGI}: name its package too, with --plugins"):
        GatewaySettings.of(**parts, fronts=(TGI,))
    with pytest.raises(ValueError, match="must be one of kserve, vllm, or PACKAGE:NAME of a plugin, not 'triton'"):
        GatewaySettings.of(**parts, fronts=("triton",))


async def test_nothing_is_called_before_there_are_routes() -> None:
    with pytest.raises(Unavailable, match="still starting"):
        await GatewayCalls().post("/v1/completions", json.dumps(ASKED).encode(), NO_TENANT)

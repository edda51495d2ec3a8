"""What requests cost in each part, through all services in one process."""

from pathlib import Path
from typing import Any

import pytest

from tests.mesh.harness import MODEL, Mesh
from tests.mesh.split import SplitMesh
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

PARTS = {"gateway", "tokenizer", "output_processor", "engine"}
BODY = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True, "return_timeline": True}


async def ask(mesh: Mesh, **fields: Any) -> dict[str, Any]:
    async with mesh.http() as http:
        answer = await http.post("/v1/completions", json=BODY | fields)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_timeline_says_what_each_part_took(socket_dir: Path) -> None:
    async with Mesh(socket_dir, common={"bill": True}).running() as mesh:
        one = await ask(mesh)
        cpu = one["timeline"]["cpu_ms"]
        assert cpu.keys() == PARTS
        assert all(milliseconds > 0 for milliseconds in cpu.values()), cpu
        assert one["usage"]["cpu_ms"] >= 0.99 * sum(cpu.values())
        # A stop string ends a request at the output processor: the engine's core does not say its end.
        stopped = await ask(mesh, stop=one["choices"][0]["text"][8:10], n=2)
        assert {choice["finish_reason"] for choice in stopped["choices"]} == {"stop"}
        assert stopped["timeline"]["cpu_ms"]["engine"] > 0
        async with mesh.http() as http:
            page = await http.get("/metrics")
        (of_tenant,) = [line for line in page.text.splitlines() if "bill_cpu" in line and 'tenant=""' in line]
        assert float(of_tenant.split()[-1]) >= cpu["gateway"] / 1e3


async def test_both_engines_of_a_split_request_count(socket_dir: Path) -> None:
    async with SplitMesh(socket_dir, engine={"kv_transports": ("shm",)}, common={"bill": True}).running() as mesh:
        timeline = (await ask(mesh))["timeline"]
        assert timeline["prefill_engine"] != timeline["decode_engine"]
        assert timeline["cpu_ms"]["engine"] > 0
        for part in mesh.engines:
            assert part.host is not None
            assert part.host.bill is not None
            assert part.host.bill.totals()[""] > 0, "its front has worked for the request"


@pytest.mark.parametrize("is_search", [False, True])
async def test_calls_of_grpc_say_the_same(socket_dir: Path, is_search: bool) -> None:
    request = inference_pb2.GenerateRequest(
        model=MODEL,
        text="Once upon a time",
        sampling_params=types_pb2.SamplingParams(max_tokens=6),
        ignore_eos=True,
        return_timeline=not is_search,
        n=2,
        beam_search=inference_pb2.BeamSearch() if is_search else None,
    )
    async with Mesh(socket_dir, common={"bill": True}).running() as mesh:
        assert mesh.gateway.host is not None
        async with open_channel(mesh.gateway.host.address) as channel:
            responses = [each async for each in inference_pb2_grpc.InferenceStub(channel).Generate(request)]
    usage, cpu = responses[-1].usage, responses[-1].timeline.cpu
    assert usage.cpu_ns > 0
    if not is_search:
        assert min(cpu.gateway_ns, cpu.tokenizer_ns, cpu.output_processor_ns, cpu.engine_ns) > 0
        assert usage.cpu_ns >= 0.9 * (cpu.gateway_ns + cpu.tokenizer_ns + cpu.output_processor_ns + cpu.engine_ns)


async def test_without_a_bill_nothing_is_said(socket_dir: Path) -> None:
    async with Mesh(socket_dir).running() as mesh:
        answer = await ask(mesh)
        assert "cpu_ms" not in answer["timeline"]
        assert "cpu_ms" not in answer["usage"]
        assert all(part.host is not None and part.host.bill is None for part in mesh.parts)
        async with mesh.http() as http:
            assert "bill_cpu" not in (await http.get("/metrics")).text

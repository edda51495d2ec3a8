"""One trace of a request through all services."""

from pathlib import Path
from typing import Any

import grpc.aio

from tests.collector import Collector
from tests.mesh.harness import MODEL, Mesh
from tests.mesh.split import SplitMesh
from tokenloom.v1 import inference_pb2, inference_pb2_grpc, types_pb2

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CHAT = {
    "messages": [{"role": "user", "content": "Who made the lamp?"}],
    "max_tokens": 4,
    "ignore_eos": True,
    "temperature": 0,
    "top_k": 7,
    "seed": 2**64 - 1,
}
SERVICES = {f"tokenloom-{name}" for name in ("gateway", "tokenizer", "output-processor", "coordinator", "engine")}
ENCODE, PICK = "tokenloom.v1.Tokenizer/EncodeChat", "tokenloom.v1.Coordinator/Pick"


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


async def ask(mesh: Mesh, **headers: str) -> None:
    async with mesh.http() as http:
        (await http.post("/v1/chat/completions", json=CHAT, headers=headers)).raise_for_status()


async def test_a_trace_has_every_part_of_a_request(socket_dir: Path) -> None:
    with Collector() as collector:
        async with Mesh(socket_dir, common={"otlp_endpoint": collector.endpoint}).running() as mesh:
            await ask(mesh)
            async with mesh.http() as http:
                accept = {"accept": "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"}
                page = (await http.get("/metrics", headers=accept)).text
    root = collector.named(f"chat {MODEL}")
    exemplars = [line for line in page.splitlines() if f'# {{trace_id="{root.trace_id.hex()}"}}' in line]
    names = {line.partition("{")[0] for line in exemplars}
    assert names == {"vllm:time_to_first_token_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket"}
    assert not root.parent_span_id
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert collector.services == SERVICES
    process, engine = collector.named("process"), collector.named("engine")
    parents = {ENCODE: root, "process": root, PICK: process, "engine": process, "detokenize": process}
    parents |= {"queue": engine, "prefill": engine, "decode": engine}
    of_steps = {"prefill chunk", "decode step", "schedule", "forward"}
    assert {span.name for span in collector.spans} == {root.name, *parents, *of_steps}
    for name, parent in parents.items():
        assert collector.named(name).parent_span_id == parent.span_id, name
    steps = [span for span in collector.spans if span.name in ("prefill chunk", "decode step")]
    assert {span.parent_span_id for span in steps} == {engine.span_id}
    assert len([span for span in steps if span.name == "decode step"]) == 3  # of four tokens
    chunks = sum(attributes(span)["tokenloom.step.tokens"] for span in steps if span.name == "prefill chunk")
    assert chunks == attributes(engine)["gen_ai.usage.input_tokens"]
    assert all(attributes(span)["tokenloom.step.sample_seconds"] > 0 for span in steps)
    for part in ("schedule", "forward"):
        places = [span.parent_span_id for span in collector.spans if span.name == part]
        assert sorted(places) == sorted(span.span_id for span in steps)
    traced = attributes(root)
    assert traced["gen_ai.operation.name"] == "chat"
    assert traced["gen_ai.request.model"] == MODEL
    assert traced["gen_ai.request.max_tokens"] == traced["gen_ai.usage.output_tokens"] == 4
    assert traced["gen_ai.usage.input_tokens"] == attributes(engine)["gen_ai.usage.input_tokens"]
    assert (traced["gen_ai.request.temperature"], traced["gen_ai.request.top_k"]) == (0.0, 7)
    assert traced["gen_ai.request.seed"] == str(2**64 - 1)  # larger than an attribute's integers
    assert traced["gen_ai.usage.cache_read.input_tokens"] == 0
    assert traced["gen_ai.response.id"] == attributes(process)["gen_ai.response.id"]
    assert traced["gen_ai.response.model"] == MODEL
    for span in collector.spans:
        assert 0 < span.start_time_unix_nano <= span.end_time_unix_nano
    assert "lamp" not in str(collector.spans)  # nobody's prompt is in a trace


async def test_disaggregated_prefill_and_decode(socket_dir: Path) -> None:
    with Collector() as collector:
        common = {"otlp_endpoint": collector.endpoint}
        async with SplitMesh(socket_dir, common=common).running() as mesh:
            await ask(mesh)
    legs = {attributes(span)["tokenloom.leg"]: span for span in collector.spans if span.name == "engine"}
    assert legs.keys() == {"prefill", "decode"}
    assert collector.named("kv_transfer").parent_span_id == legs["decode"].span_id
    assert collector.named("decode").parent_span_id == legs["decode"].span_id
    assert {span.parent_span_id for span in legs.values()} == {collector.named("process").span_id}


async def test_the_clients_trace_is_continued_and_its_choice_kept(socket_dir: Path) -> None:
    with Collector() as collector:
        async with Mesh(socket_dir, common={"otlp_endpoint": collector.endpoint}).running() as mesh:
            await ask(mesh, traceparent=PARENT[:-1] + "0")  # not sampled
            await ask(mesh, traceparent=PARENT, tracestate="vendor=1")
            async with grpc.aio.insecure_channel(mesh.address("gateway-0")) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                request = inference_pb2.GenerateRequest(
                    text="four", sampling_params=types_pb2.SamplingParams(max_tokens=1)
                )
                async for _ in stub.Generate(request, metadata=(("traceparent", PARENT.replace("0af", "1af")),)):
                    pass
    roots = {span.name: span for span in collector.spans if span.parent_span_id.hex() == "b7ad6b7169203331"}
    assert roots.keys() == {f"chat {MODEL}", f"text_completion {MODEL}"}
    assert roots[f"chat {MODEL}"].trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert {span.trace_id.hex()[:3] for span in collector.spans} == {"0af", "1af"}


async def test_a_failure_is_part_of_the_trace(socket_dir: Path) -> None:
    with Collector() as collector:
        async with (
            Mesh(socket_dir, common={"otlp_endpoint": collector.endpoint}).running() as mesh,
            mesh.http() as http,
        ):
            answer = await http.post("/v1/completions", json={"prompt": "four", "max_tokens": 100_000})
            assert answer.status_code == 400
    root = collector.named(f"text_completion {MODEL}")
    assert "max_tokens" in root.status.message
    assert attributes(root)["error.type"] == "CONTEXT_LENGTH_EXCEEDED"


async def test_an_unreachable_collector_does_no_harm(socket_dir: Path) -> None:
    async with Mesh(socket_dir, common={"otlp_endpoint": "http://127.0.0.1:9"}).running() as mesh:
        for _ in range(3):
            await ask(mesh)

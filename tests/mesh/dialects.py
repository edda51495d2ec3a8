"""Asks in every form of a request, and reads from each answer what has computed it."""

from collections.abc import Awaitable, Callable
from typing import Any

from tests.mesh.harness import MODEL, Mesh
from tests.ready_channel import ready_channel
from tokenloom.v1 import inference_pb2
from tokenloom.v1.inference_pb2_grpc import InferenceStub
from tokenloom.v1.kserve import grpc_service_pb2 as kserve_pb2
from tokenloom.v1.kserve.grpc_service_pb2_grpc import GRPCInferenceServiceStub
from tokenloom.v1.types_pb2 import TokenIds
from tokenloom.v1.vllm import vllm_engine_pb2
from tokenloom.v1.vllm.vllm_engine_pb2_grpc import VllmEngineStub

PROMPT_IDS = [1, 2, 3]
TEXT = "A lantern"
Origin = tuple[str, bool]
"""The version of the weights, empty: none is named; and whether engines of different numerics are said to have
computed the answer."""
TURNS = [{"role": "user", "content": TEXT}]


def of(members: dict[str, Any]) -> Origin:
    return members.get("weights_version", ""), members.get("mixed_numerics", False)


def posts(path: str, *where: str | int, **body: Any) -> Callable[[Mesh, int], Awaitable[Origin]]:
    """``where``: the way to the members that say it."""

    async def ask(mesh: Mesh, num_tokens: int) -> Origin:
        sizes = {name: num_tokens if value is None else value for name, value in body.items()}
        if "options" in sizes:
            sizes["options"] = {"num_predict": num_tokens, "temperature": 0}
        if "sampling_params" in sizes:
            sizes["sampling_params"] = {"max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}
        async with mesh.http() as http:
            answer = await http.post(path, json={"model": MODEL, **sizes})
        assert answer.status_code == 200, answer.text
        members = answer.json()
        for step in where:
            members = members[step]
        return of(members)

    return ask


async def by_grpc(mesh: Mesh, num_tokens: int) -> Origin:
    request = inference_pb2.GenerateRequest(token_ids=TokenIds(ids=PROMPT_IDS))
    request.sampling_params.max_tokens, request.ignore_eos = num_tokens, True
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub: Any = InferenceStub(channel)
        last = [each async for each in stub.Generate(request)][-1]
    return last.weights_version, last.mixed_numerics


async def by_kserve(mesh: Mesh, num_tokens: int) -> Origin:
    request = kserve_pb2.ModelInferRequest(model_name=MODEL)
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(TEXT.encode())
    request.parameters["max_tokens"].int64_param = num_tokens
    request.parameters["ignore_eos"].bool_param = True
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)
        parameters = (await stub.ModelInfer(request)).parameters
    is_mixed = "mixed_numerics" in parameters and parameters["mixed_numerics"].bool_param
    return parameters["weights_version"].string_param, is_mixed


async def by_vllms_contract(mesh: Mesh, num_tokens: int) -> Origin:
    request = vllm_engine_pb2.GenerateRequest(tokenized=vllm_engine_pb2.TokenizedInput(input_ids=PROMPT_IDS))
    request.sampling_params.max_tokens, request.sampling_params.ignore_eos = num_tokens, True
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub: Any = VllmEngineStub(channel)
        call = stub.Generate(request)
        assert [each async for each in call]
        said = dict(await call.trailing_metadata())
    return str(said.get("x-tokenloom-weights-version", "")), said.get("x-tokenloom-mixed-numerics") == "true"


async def vectors_by_grpc(mesh: Mesh, num_tokens: int) -> Origin:
    request = inference_pb2.EmbedRequest(inputs=[inference_pb2.PoolInput(text=TEXT)])
    async with ready_channel(mesh.gateway.settings.listen) as channel:
        stub: Any = InferenceStub(channel)
        last = [each async for each in stub.Embed(request)][-1]
    return last.weights_version, False


GREEDY = {"temperature": 0, "ignore_eos": True}
DIALECTS: dict[str, Callable[[Mesh, int], Awaitable[Origin]]] = {
    "chat": posts("/v1/chat/completions", "choices", 0, messages=TURNS, max_tokens=None, **GREEDY),
    "completion": posts("/v1/completions", "choices", 0, prompt=PROMPT_IDS, max_tokens=None, **GREEDY),
    "tokens": posts("/inference/v1/generate", "choices", 0, token_ids=PROMPT_IDS, sampling_params={}),
    "messages": posts("/v1/messages", messages=TURNS, max_tokens=None, **GREEDY),
    "responses": posts("/v1/responses", input=TEXT, max_output_tokens=None, **GREEDY),
    "ollama generate": posts("/api/generate", prompt=TEXT, raw=True, stream=False, options={}),
    "ollama chat": posts("/api/chat", messages=TURNS, stream=False, options={}),
    "grpc": by_grpc,
    "kserve": by_kserve,
    "vllm": by_vllms_contract,
}
VECTORS: dict[str, Callable[[Mesh, int], Awaitable[Origin]]] = {
    "embeddings": posts("/v1/embeddings", input=TEXT),
    "ollama": posts("/api/embed", input=TEXT),
    "ollama of old": posts("/api/embeddings", prompt=TEXT),
    "grpc": vectors_by_grpc,
}

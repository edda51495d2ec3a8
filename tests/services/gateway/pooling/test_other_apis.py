"""Tests vectors in the forms of other servers: Ollama's API and the Open Inference Protocol."""

import grpc.aio
import httpx
import pytest

from tests.services.gateway.fakes import FakeMesh
from tests.services.gateway.pooling.conftest import EMBED
from tokenloom.services.gateway.http.request_body import OFF_LOOP_BYTES
from tokenloom.services.gateway.pooling.vector_json import numbers
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1.kserve import grpc_service_pb2 as pb
from tokenloom.v1.kserve import grpc_service_pb2_grpc


async def test_ollama_embeds_one_text_or_several(http: httpx.AsyncClient) -> None:
    one = (await http.post("/api/embed", json={"model": "fake", "input": "abc"})).json()
    assert (one["model"], one["embeddings"], one["prompt_eval_count"]) == ("fake", [[3.0, 97.0]], 3)
    both = (await http.post("/api/embed", json={"model": "fake", "input": ["abc", "b" * 600]})).json()
    assert both["embeddings"] == [[3.0, 97.0], [512.0, 98.0]]
    older = (await http.post("/api/embeddings", json={"model": "fake", "prompt": "abc"})).json()
    assert older == {"embedding": [3.0, 97.0]}


async def test_ollamas_errors_have_its_form(http: httpx.AsyncClient) -> None:
    for given in ("b" * 600, "b" * (OFF_LOOP_BYTES + 1)):
        refused = await http.post("/api/embed", json={"model": "fake", "input": given, "truncate": False})
        assert refused.status_code == 400
        assert "context" in refused.json()["error"]
    refused = await http.post("/api/embed", json={"model": "fake", "input": [97] * 600, "truncate": False})
    assert refused.json()["error"].endswith("send a shorter one, or set truncate"), "Ollama's own field"


@pytest.mark.parametrize("tasks", [[EMBED]])
async def test_kserve_has_a_tensor_of_vectors(mesh: FakeMesh) -> None:
    async with open_channel(mesh.grpc_address) as channel:
        stub = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="fake"))
        assert [tensor.datatype for tensor in metadata.outputs if tensor.name == "embedding"] == ["FP32"]
        request = pb.ModelInferRequest(model_name="fake", id="7")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[2])
        tensor.contents.bytes_contents.extend([b"abc", b"b"])
        request.parameters["normalize"].bool_param = False
        response = await stub.ModelInfer(request)
        (output,) = response.outputs
        assert (output.name, list(output.shape), response.id) == ("embedding", [2, 2], "7")
        assert list(output.contents.fp32_contents) == [3, 97, 1, 98]
        wrong = pb.ModelInferRequest()
        wrong.CopyFrom(request)
        wrong.parameters["normalize"].string_param = "yes"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.ModelInfer(wrong)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "normalize must be a boolean" in (refused.value.details() or "")
        (submit, _) = [each.submit for each in mesh.outputs.sessions[0].requests.values()]
        assert submit.pooling_params.HasField("use_activation")
        del tensor.contents.bytes_contents[:]
        request.raw_input_contents.append(b"\x01\0\0\0a\x02\0\0\0bc")
        raw = await stub.ModelInfer(request)
        assert numbers(raw.raw_output_contents[0]) == [1, 97, 2, 98]

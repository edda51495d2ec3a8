"""The Open Inference Protocol at a gateway."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.loop_clock import pass_time
from tests.services.gateway.fakes import LIMITS, MODEL, FakeMesh
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.peers import channels
from tokenloom.v1 import types_pb2
from tokenloom.v1.kserve import grpc_service_pb2 as pb
from tokenloom.v1.kserve import grpc_service_pb2_grpc


@pytest.fixture
async def stub(mesh: FakeMesh) -> AsyncIterator[Any]:
    async with channels.open_channel(mesh.grpc_address) as channel:
        yield grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)


def infer(*texts: str, outputs: Iterable[str] = (), stream: bool | None = None, **parameters: Any) -> Any:
    request = pb.ModelInferRequest(model_name=MODEL, id="7")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[len(texts)])
    tensor.contents.bytes_contents.extend(text.encode() for text in texts)
    if stream is not None:
        request.inputs.add(name="stream", datatype="BOOL", shape=[1]).contents.bool_contents.append(stream)
    for name in outputs:
        request.outputs.add(name=name)
    for name, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    return request


def text_tensor(request: Any, name: str, *values: bytes) -> None:
    request.inputs.add(name=name, datatype="BYTES", shape=[len(values)]).contents.bytes_contents.extend(values)


def outputs_of(response: Any) -> dict[str, list[str]]:
    return {output.name: [value.decode() for value in output.contents.bytes_contents] for output in response.outputs}


async def test_readiness_and_metadata(mesh: FakeMesh, stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name=MODEL, version="1"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="other"))).ready
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "tokenloom"
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name=MODEL))
    assert [tensor.name for tensor in metadata.outputs] == ["text_output", "finish_reason"]
    assert {tensor.name: list(tensor.shape) for tensor in metadata.inputs}["text_input"] == [-1]


async def test_two_texts(mesh: FakeMesh, stub: Any) -> None:
    asking = asyncio.ensure_future(stub.ModelInfer(infer("ab", "c", max_tokens=5, temperature=0.5, stop="END")))
    first, second = [await mesh.outputs.next_request() for _ in range(2)]
    assert bytes(first.submit.prompt.token_ids) == b"ab"
    assert (first.submit.sampling_params.max_tokens, first.submit.sampling_params.temperature) == (5, 0.5)
    assert first.submit.text.stop == ["END"]
    second.answer("two")
    first.answer("one", "!")
    response = await asking
    assert outputs_of(response) == {"text_output": ["one!", "two"], "finish_reason": ["stop", "stop"]}
    assert [list(output.shape) for output in response.outputs] == [[2], [2]]
    assert (response.id, response.model_name) == ("7", MODEL)
    assert response.parameters["prompt_tokens"].int64_param == 3
    assert response.parameters["completion_tokens"].int64_param == 7


SET = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize("stream", [None, True])
async def test_what_a_schema_loses_is_named(mesh: FakeMesh, stub: Any, stream: bool | None) -> None:
    request = infer("a", stream=stream)
    text_tensor(request, "sampling_parameters", json.dumps({"structured_outputs": {"json": SET}}).encode())
    call = stub.ModelInfer(request) if stream is None else stub.ModelStreamInfer(iter([request]))
    submitted = await mesh.outputs.next_request()
    assert json.loads(submitted.submit.sampling_params.structured_outputs.json) == {"type": "array"}
    submitted.answer("[", "]")
    last = await call if stream is None else [response.infer_response async for response in call][-1]
    assert last.parameters["x-tokenloom-ignored"].string_param == "structured_outputs#/uniqueItems"


async def test_a_constraint_that_cannot_be_compiled_is_the_clients(mesh: FakeMesh, stub: Any) -> None:
    request = infer("a")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": []}}}
    text_tensor(request, "sampling_parameters", json.dumps({"response_format": form}).encode())
    asking = asyncio.ensure_future(stub.ModelInfer(request))
    words = "structured_outputs: Unsatisfiable schema"
    (await mesh.outputs.next_request()).fail(errors.InvalidArgument(words, "structured_outputs"))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asking
    assert refused.value.details() == "response_format: Unsatisfiable schema"


async def test_raw_in_raw_out_and_the_prompt_again(mesh: FakeMesh, stub: Any) -> None:
    mesh.outputs.auto = ["x"]
    request = pb.ModelInferRequest(model_name=MODEL, raw_input_contents=[b"\2\0\0\0ab", b"\0"])
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1, 1])
    request.inputs.add(name="exclude_input_in_output", datatype="BOOL", shape=[1])
    request.outputs.add(name="text_output")
    response = await stub.ModelInfer(request)
    assert list(response.raw_output_contents) == [b"\3\0\0\0abx"]


async def test_sampling_parameters_as_json(mesh: FakeMesh, stub: Any) -> None:
    request = infer("ab", max_tokens=3)
    text_tensor(request, "sampling_parameters", b'{"max_tokens": 9, "stop_token_ids": [5]}')
    asking = asyncio.ensure_future(stub.ModelInfer(request))
    submitted = await mesh.outputs.next_request()
    assert submitted.submit.sampling_params.max_tokens == 3  # the parameter, not the tensor
    assert 5 in submitted.submit.sampling_params.stop_token_ids
    submitted.answer("x")
    await asking


async def test_a_limit_beyond_the_room_in_the_context_is_cut(mesh: FakeMesh, stub: Any) -> None:
    asking = asyncio.ensure_future(stub.ModelInfer(infer("ab", max_tokens=100_000)))
    request = await mesh.outputs.next_request()
    assert request.submit.sampling_params.max_tokens == LIMITS.max_model_len - 2
    request.answer("x", reason=types_pb2.FINISH_REASON_LENGTH)
    assert outputs_of(await asking)["finish_reason"] == ["length"]
    for limit, left in ((100_000, LIMITS.max_model_len - 1), (12, LIMITS.max_model_len - 12)):
        asking = asyncio.ensure_future(stub.ModelInfer(infer("a" * 2000, max_tokens=limit, truncate_prompt_tokens=-1)))
        request = await mesh.outputs.next_request()
        assert len(request.submit.prompt.token_ids) == left
        request.answer("x")
        await asking


async def test_a_stream_of_requests(mesh: FakeMesh, stub: Any) -> None:
    call = stub.ModelStreamInfer(iter([infer("ab", stream=True), infer("ab", top_p=7.0), infer("ab")]))
    submitted = await mesh.outputs.next_request()
    submitted.send("Hi", [1, 2])
    first = await call.read()
    assert outputs_of(first.infer_response) == {"text_output": ["Hi"], "finish_reason": [""]}
    assert "triton_final_response" not in first.infer_response.parameters
    submitted.finish()
    last = await call.read()
    assert outputs_of(last.infer_response) == {"text_output": [""], "finish_reason": ["stop"]}
    assert last.infer_response.parameters["triton_final_response"].bool_param
    failed = await call.read()
    assert "top_p" in failed.error_message
    assert failed.infer_response.id == "7"
    (await mesh.outputs.next_request()).answer("whole")
    assert outputs_of((await call.read()).infer_response)["text_output"] == ["whole"]
    assert await call.read() is grpc.aio.EOF


async def test_leaving_cancels(mesh: FakeMesh, stub: Any) -> None:
    call = stub.ModelInfer(infer("ab"))
    submitted = await mesh.outputs.next_request()
    call.cancel()
    async with asyncio.timeout(30):
        await submitted.cancelled.wait()


async def test_a_timeout_in_microseconds(mesh: FakeMesh, stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(infer("ab", timeout=50_000))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def _broken(change: Any) -> Any:
    request = infer("ab")
    change(request)
    return request


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.ModelInferRequest(model_name=MODEL), "text_input"),
        (infer("ab", temperature=-1.0), "temperature"),
        (infer("ab", max_tokens="5"), "max_tokens"),
        (infer("ab", max_tokens=0), "max_tokens"),
        (infer("ab", logprobs=3), "logprobs"),
        (infer("ab", prompt="x"), "prompt"),
        (infer("ab", timeout=0), "timeout"),
        (infer("ab", stream=True), "stream"),
        (infer("ab", outputs=["logits"]), "outputs"),
        (infer(""), "text_input"),
        (_broken(lambda r: text_tensor(r, "sampling_parameters", b"[]")), None),
        (_broken(lambda r: text_tensor(r, "sampling_parameters", b"{}", b"{}")), "sampling_parameters"),
        (_broken(lambda r: text_tensor(r, "image", b"")), "inputs"),
        (_broken(lambda r: r.inputs[0].shape.append(3)), "text_input"),
        (_broken(lambda r: setattr(r.inputs[0], "datatype", "FP32")), "text_input"),
        (_broken(lambda r: r.raw_input_contents.extend([b"", b""])), "raw_input_contents"),
        (_broken(lambda r: r.raw_input_contents.append(b"\5\0\0\0ab")), "text_input"),
        (_broken(lambda r: r.raw_input_contents.append(b"\1\0\0\0\xff")), "text_input"),
    ],
)
async def test_errors_name_the_field(mesh: FakeMesh, stub: Any, request_: Any, field: str | None) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ModelInfer(request_)
    error = wire_errors.from_rpc(caught.value)
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == field


async def test_other_models_and_versions(mesh: FakeMesh, stub: Any) -> None:
    for name, version in (("other", ""), (MODEL, "2")):
        request = infer("ab")
        request.model_name, request.model_version = name, version
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_stream_that_says_nothing_ends_and_leaves_its_place(socket_dir: Path) -> None:
    """It held one of the gateway's calls for ever, and any number of them one tenant."""
    async with (
        FakeMesh(socket_dir).gateway(request_timeout=20, tenant_sessions=1) as mesh,
        channels.open_channel(mesh.grpc_address) as channel,
    ):
        stub: Any = grpc_service_pb2_grpc.GRPCInferenceServiceStub(channel)
        mesh.outputs.auto = ["x"]
        for num_requests in range(2):  # before its first request, and after it
            idle = stub.ModelStreamInfer()
            for _ in range(num_requests):
                await idle.write(infer("ab"))
                assert outputs_of((await idle.read()).infer_response)["text_output"] == ["x"]
            await until_sessions(mesh, 1)
            other = stub.ModelStreamInfer(iter([infer("ab")]))
            assert await other.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "tenant's limit sessions is 1" in await other.details()
            pass_time(20)
            with pytest.raises(grpc.aio.AioRpcError, match=r"no request arrived within 20 s") as ended:
                await idle.read()
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_sessions(mesh, 0)


async def until_sessions(mesh: FakeMesh, count: int) -> None:
    """Wait until the gateway has so many streams of requests open."""
    line = f'tokenloom_tenant_sessions{{tenant=""}} {count:.1f}'
    async with mesh.http() as http, asyncio.timeout(30):
        while line not in (await http.get("/metrics")).text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def streamed(stub: Any, **parameters: Any) -> list[Any]:
    call = stub.ModelStreamInfer(iter([infer("ab", stream=True, **parameters)]))
    return [part.infer_response async for part in call]


async def test_a_stream_continues_after_a_response(mesh: FakeMesh, stub: Any) -> None:
    asking = asyncio.create_task(streamed(stub, resumable=True))
    first = await mesh.outputs.next_request()
    assert first.submit.take_over, "the id names the request"
    first.answer("one", " two", " three")
    whole = await asking
    for number, response in enumerate(whole, 1):
        last_id = response.parameters["event_id"].string_param
        asking = asyncio.create_task(streamed(stub, resumable=True, last_event_id=last_id))
        request, resume = await mesh.outputs.next_resume()
        assert (resume.request_id, resume.fingerprint) == (first.submit.request_id, first.submit.fingerprint)
        request.answer("one two", " thr", "ee")
        rest = await asking
        texts = [text for each in [*whole[:number], *rest] for text in outputs_of(each).get("text_output", [])]
        assert "".join(texts) == "one two three"
        assert rest[-1].parameters["triton_final_response"].bool_param
        assert rest[-1].parameters["completion_tokens"].int64_param == 13


async def test_a_plain_stream_has_no_ids_and_is_not_kept(mesh: FakeMesh, stub: Any) -> None:
    asking = asyncio.create_task(streamed(stub))
    request = await mesh.outputs.next_request()
    assert not request.submit.fingerprint
    request.answer("x")
    assert all("event_id" not in response.parameters for response in await asking)


async def test_a_request_with_an_id_may_be_repeated(mesh: FakeMesh, stub: Any) -> None:
    submits = []
    for _ in range(2):
        asking = asyncio.ensure_future(stub.ModelInfer(infer("ab", resumable=True)))
        request = await mesh.outputs.next_request()
        submits.append(request.submit)
        request.answer("x")
        await asking
    assert len({submit.request_id for submit in submits}) == len({submit.fingerprint for submit in submits}) == 1
    assert all(submit.take_over for submit in submits)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"resumable": 1}, "resumable must be set as bool_param"),
        ({"last_event_id": "x"}, "last_event_id needs resumable"),
        ({"last_event_id": "x", "resumable": True}, "last_event_id is not the event_id of a response"),
        ({"last_event_id": f"{'ab' * 20}.1.3-3_1-1", "resumable": True}, "with more outputs"),
    ],
)
async def test_a_wrong_continuation_is_refused(stub: Any, parameters: dict[str, Any], words: str) -> None:
    call = stub.ModelStreamInfer(iter([infer("ab", stream=True, **parameters)]))
    (message,) = [part.error_message async for part in call]
    assert words in message
    if words == "with more outputs":
        with pytest.raises(grpc.aio.AioRpcError, match="resumes streams only"):
            await stub.ModelInfer(infer("ab", last_event_id=f"{'ab' * 20}.1.3-3", resumable=True))

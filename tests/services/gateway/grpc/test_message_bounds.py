"""Large gRPC messages are counted before they are decoded, and their lists before they are narrowed."""

from typing import Any

import grpc
import pytest

from tests.services.gateway.fakes import MODEL, FakeMesh
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.gateway.grpc import chat_prompt
from tokenloom.services.runtime.host.limits import LARGE_BYTES, MAX_FIELDS, check_fields
from tokenloom.services.runtime.peers.channels import open_channel
from tokenloom.v1 import inference_pb2, inference_pb2_grpc
from tokenloom.v1.kserve import grpc_service_pb2

GENERATE: Any = inference_pb2.GenerateRequest.DESCRIPTOR
SIZE = 7 << 20
EMPTY_MESSAGE, EMPTY_STOP = b"\x0a\x00", inference_pb2.GenerateRequest(stop=[""]).SerializeToString()


def chat_of(content: bytes) -> bytes:
    """Return a request whose chat is ``content`` on the wire."""
    size = len(content)
    lengths = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14 & 0x7F | 0x80, size >> 21])
    return bytes([GENERATE.fields_by_name["chat"].number << 3 | 2]) + lengths + content


def test_ordinary_messages_pass() -> None:
    message = inference_pb2.ChatMessage(role="user", content="x" * 100)
    chat = inference_pb2.ChatPrompt(messages=[message] * 4000)
    ids = inference_pb2.GenerateRequest()
    ids.token_ids.ids.extend(range(1_000_000))
    for request in (
        ids,
        inference_pb2.GenerateRequest(model=MODEL, chat=chat, n=300),
        inference_pb2.GenerateRequest(text="é" * 1_000_000),
    ):
        check_fields(request.SerializeToString(), GENERATE)


@pytest.mark.parametrize(
    "data",
    [chat_of(EMPTY_MESSAGE * (SIZE // 2)), EMPTY_STOP * (SIZE // 3), b"\x08\x01" * SIZE],
    ids=["nested", "texts", "unknown"],
)
def test_too_many_fields_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=f"more than {MAX_FIELDS} fields"):
        check_fields(data, GENERATE)


def test_groups_cannot_hide_fields() -> None:
    with pytest.raises(InvalidArgument, match="group"):
        check_fields(b"\xfb\x7f\xfc\x7f" + EMPTY_STOP * MAX_FIELDS, GENERATE)


@pytest.mark.parametrize("data", [b"\xfa" * 100, b"\x0a", b"\x0a\xff\xff\xff\xff\x0f", b"\x09\x00", b""])
def test_what_cannot_be_decoded_is_left_to_the_decoder(data: bytes) -> None:
    check_fields(data, GENERATE)


async def test_the_gateway_refuses_them(mesh: FakeMesh) -> None:
    async with open_channel(mesh.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        send: Any = channel.unary_stream("/tokenloom.v1.Inference/Generate")
        infer: Any = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        tensors = grpc_service_pb2.ModelInferRequest(raw_input_contents=[b""]).SerializeToString()
        messages = [inference_pb2.ChatMessage()] * (chat_prompt.MAX_MESSAGES + 1)
        chat = inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=messages))
        stops = inference_pb2.GenerateRequest(text="a", stop=["a"] * 17)
        for call, words in (
            (send(chat_of(EMPTY_MESSAGE * (SIZE // 2))).read(), "fields"),
            (infer(tensors * (SIZE // len(tensors))), "fields"),
            (stub.Generate(chat).read(), "chat.messages may hold at most 4096, not 4097"),
            (stub.Generate(stops).read(), "stop may hold at most 16 strings"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in (caught.value.details() or "")
    assert LARGE_BYTES < SIZE

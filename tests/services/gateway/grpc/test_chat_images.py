"""Images of chats over gRPC."""

import json
import math

import grpc.aio
import pytest

from tests.services.gateway.fake_encoders import Vision
from tokenloom.request import errors, wire_errors
from tokenloom.v1 import inference_pb2 as pb


async def test_images_go_to_encoders(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    parts = [pb.ContentPart(image=b"an image"), pb.ContentPart(text="What is this?")]
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=parts)], mm_processor_kwargs={"max_pixels": 99})
    async with vision.mesh.inference() as stub:
        texts = [each.text async for each in stub.Generate(pb.GenerateRequest(chat=chat))]
    assert "".join(texts) == "blue"
    assert len(vision.held(b"an image")) == 1
    assert [size.options_json for size in vision.chats[-1].media] == [b'{"max_pixels":99}']


@pytest.mark.parametrize(("options", "rate"), [({"max_pixels": 99}, 0.5), ({}, 2.0)])
async def test_a_fraction_of_frames_a_second(vision: Vision, options: dict[str, int], rate: float) -> None:
    vision.mesh.outputs.auto = ["blue"]
    parts = [pb.ContentPart(image=b"an image"), pb.ContentPart(text="What is this?")]
    message = pb.ChatMessage(role="user", parts=parts)
    chat = pb.ChatPrompt(messages=[message], mm_processor_kwargs=options, fps=rate)
    async with vision.mesh.inference() as stub:
        async for _ in stub.Generate(pb.GenerateRequest(chat=chat)):
            pass
    (size,) = vision.chats[-1].media
    assert json.loads(size.options_json) == {**options, "fps": rate}


@pytest.mark.parametrize(
    ("options", "rate", "message"),
    [({"fps": 2}, 0.5, "exclude each other"), *(({}, rate, "above 0") for rate in (0.0, -1.0, math.nan, math.inf))],
)
async def test_frames_a_second_that_are_refused(
    vision: Vision, options: dict[str, int], rate: float, message: str
) -> None:
    turn = pb.ChatMessage(role="user", parts=[pb.ContentPart(image=b"an image")])
    chat = pb.ChatPrompt(messages=[turn], mm_processor_kwargs=options, fps=rate)
    async with vision.mesh.inference() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in stub.Generate(pb.GenerateRequest(chat=chat)):
                pass
    error = wire_errors.from_rpc(refusal.value)
    assert isinstance(error, errors.InvalidArgument)
    assert error.field == "chat.fps"
    assert message in error.message


async def test_options_of_no_processor_are_refused(vision: Vision) -> None:
    message = pb.ChatMessage(role="user", parts=[pb.ContentPart(image=b"an image")])
    for options in ({"do_resize": 1}, {"max_pixels": 0}):
        async with vision.mesh.inference() as stub:
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                async for _ in stub.Generate(
                    pb.GenerateRequest(chat=pb.ChatPrompt(messages=[message], mm_processor_kwargs=options))
                ):
                    pass
        error = wire_errors.from_rpc(refusal.value)
        assert isinstance(error, errors.InvalidArgument)
        assert error.field == f"chat.mm_processor_kwargs.{next(iter(options))}"

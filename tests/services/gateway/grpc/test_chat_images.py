"""Images of chats over gRPC."""

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

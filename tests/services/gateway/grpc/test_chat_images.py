"""Images of chats over gRPC."""

from tests.services.gateway.fake_encoders import Vision
from tokenloom.v1 import inference_pb2 as pb


async def test_images_go_to_encoders(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    parts = [pb.ContentPart(image=b"an image"), pb.ContentPart(text="What is this?")]
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=parts)])
    async with vision.mesh.inference() as stub:
        texts = [each.text async for each in stub.Generate(pb.GenerateRequest(chat=chat))]
    assert "".join(texts) == "blue"
    assert len(vision.held(b"an image")) == 1
    assert len(vision.chats[-1].media) == 1

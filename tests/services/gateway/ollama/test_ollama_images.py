"""Images in Ollama's chats and prompts stand before the text."""

import base64
import json
from typing import Any

import pytest

from tests.services.gateway.fake_encoders import Vision

IMAGE, LARGE = b"an image", bytes(range(256)) * 800


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def post(vision: Vision, path: str, **fields: Any) -> Any:
    vision.mesh.outputs.auto = ["blue"]
    return await vision.http.post(path, json={"model": "fake", "stream": False, **fields})


@pytest.mark.parametrize("images", [[IMAGE], [LARGE, IMAGE, LARGE[:100_000]]])
async def test_images(vision: Vision, images: list[bytes]) -> None:
    encoded = list(map(b64, images))
    turn = {"role": "user", "content": "What is this?", "images": encoded}
    for path, fields in (("/api/chat", {"messages": [turn]}), ("/api/generate", {"prompt": "Hm?", "images": encoded})):
        response = await post(vision, path, **fields)
        assert response.status_code == 200, response.text
        (said,) = json.loads(vision.chats[-1].messages_json)
        assert [part["type"] for part in said["content"]] == ["image"] * len(images) + ["text"]
    for data in images:
        assert len(vision.held(data)) == 1
    assert vision.num_puts == len(images)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"messages": [{"role": "user", "content": "", "images": ["!"]}]}, "messages[0].images[0]"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "user", "images": [b64(b"bad")]}]},
            "messages[1].images[0]",
        ),
        ({"messages": [{"role": "user", "content": "a", "images": "b"}]}, "messages[0].images"),
    ],
)
async def test_errors_name_the_image(vision: Vision, fields: dict[str, Any], name: str) -> None:
    response = await post(vision, "/api/chat", **fields)
    assert response.status_code == 400
    assert name in response.json()["error"]


async def test_a_model_that_reads_images_says_so(vision: Vision) -> None:
    shown = (await vision.http.post("/api/show", json={"model": "fake"})).json()
    assert "vision" in shown["capabilities"]

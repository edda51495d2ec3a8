"""Images in Anthropic's messages, of users and of tools, and what counts and clears them."""

import base64
import json
from hashlib import sha256
from typing import Any

import pytest

from tests.services.gateway.fake_encoders import Vision

IMAGE, LARGE = b"an image", bytes(range(256)) * 800
SHOT = b"of a tool"


def image(data: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(data).decode()}
    return {"type": "image", "source": source}


URL = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
TEXT = {"type": "text", "text": "What is this?"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "look", "input": {}}]}


def result(*blocks: Any, **members: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [*blocks], **members}]}


async def post(vision: Vision, *messages: Any, path: str = "/v1/messages", **fields: Any) -> Any:
    vision.mesh.outputs.auto = ["blue"]
    body = {"model": "fake", "max_tokens": 9, "messages": [*messages], **fields}
    if path != "/v1/messages":
        del body["max_tokens"]
    return await vision.http.post(path, json=body)


def contents(vision: Vision) -> list[Any]:
    return [turn["content"] for turn in json.loads(vision.chats[-1].messages_json)]


@pytest.mark.parametrize("data", [IMAGE, LARGE])
async def test_images_of_users(vision: Vision, data: bytes) -> None:
    response = await post(vision, {"role": "user", "content": [image(data), TEXT, URL]})
    assert response.status_code == 200, response.text
    assert contents(vision) == [[{"type": "image"}, {"type": "text", "text": "What is this?"}, {"type": "image"}]]
    assert vision.held(data)
    assert [item.digest for item in vision.chats[-1].media] == [sha256(each).digest() for each in (data, IMAGE)]


async def test_images_of_tools(vision: Vision) -> None:
    asked = {"role": "user", "content": "Look."}
    response = await post(vision, asked, USE, result({"type": "text", "text": "seen"}, image(SHOT), is_error=True))
    assert response.status_code == 200, response.text
    assert contents(vision)[2] == [{"type": "text", "text": "Error: seen"}, {"type": "image"}]
    response = await post(vision, asked, USE, result(image(SHOT)))
    assert response.status_code == 200, response.text
    assert vision.num_puts == 1


@pytest.mark.parametrize(
    ("block", "field"),
    [
        (image(b"bad"), "messages[0].content[1].source.data"),
        ({"type": "image"}, "messages[0].content[1].source"),
        ({"type": "video", "source": {"type": "base64"}}, "messages[0].content[1].type: 'video'"),
        ({"type": "audio", "source": {"type": "base64"}}, "messages[0].content[1].type: 'audio'"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "messages[0].content[1].source.type"),
        ({"type": "image", "source": {"type": "base64"}}, "messages[0].content[1].source.media_type"),
        ({"type": "image", "source": {"type": "url", "url": "ftp://a"}}, "messages[0].content[1].source.url"),
    ],
)
async def test_errors_name_the_block(vision: Vision, block: Any, field: str) -> None:
    response = await post(vision, {"role": "user", "content": [TEXT, block]}, system="s")
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


async def test_tokens_of_images_are_counted(vision: Vision) -> None:
    response = await post(vision, {"role": "user", "content": [image(IMAGE), TEXT]}, path="/v1/messages/count_tokens")
    assert response.status_code == 200, response.text
    assert response.json()["input_tokens"] == len(vision.chats[-1].messages_json)
    assert len(vision.chats[-1].media) == 1
    for each in vision.encoders:
        assert not each.pins or await each.released.get()


async def test_cleared_results_take_their_images_along(vision: Vision) -> None:
    edits = {
        "edits": [
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "tool_uses", "value": 1},
                "keep": {"type": "tool_uses", "value": 1},
            }
        ]
    }
    second = json.loads(json.dumps([USE, result(image(IMAGE))]).replace('"1"', '"2"'))
    asked = {"role": "user", "content": [TEXT, URL]}
    response = await post(
        vision, asked, USE, result({"type": "text", "text": "x" * 30}, image(SHOT)), *second, context_management=edits
    )
    assert response.status_code == 200, response.text
    assert [len(chat.media) for chat in vision.chats] == [3, 2] or [len(c.media) for c in vision.chats] == [2, 3]
    assert response.json()["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1


async def test_long_arguments_of_tools_stay(vision: Vision) -> None:
    data = "name,age\nAda,36\n" * 9000
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "save", "input": {"data": data}}]}
    done = result({"type": "text", "text": "saved"})
    turns = ({"role": "user", "content": "Save."}, use, done)
    response = await post(vision, *turns, path="/v1/messages/count_tokens")
    assert response.status_code == 200, response.text
    (call,) = json.loads(vision.chats[-1].messages_json)[1]["tool_calls"]
    assert call["function"]["arguments"] == {"data": data}

"""Images and sounds of the Responses API, which later responses find again."""

import base64
import json
from typing import Any

import pytest

from tests.services.gateway.fake_encoders import AUDIO, SOUND, Vision, data_url

IMAGE, LARGE = b"an image", bytes(range(256)) * 800
ASKED = {"type": "input_text", "text": "What is this?"}


def image(data: bytes, **members: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": data_url(data), **members}


async def post(vision: Vision, *parts: Any, **fields: Any) -> Any:
    vision.mesh.outputs.auto = ["blue"]
    body = {"model": "fake", "input": [{"role": "user", "content": [*parts]}], **fields}
    return await vision.http.post("/v1/responses", json=body)


def turns(vision: Vision) -> list[Any]:
    return [turn["content"] for turn in json.loads(vision.chats[-1].messages_json)]


@pytest.mark.parametrize("data", [IMAGE, LARGE])
async def test_the_next_response_finds_the_image_again(vision: Vision, data: bytes) -> None:
    first = await post(vision, ASKED, image(data, detail="auto"))
    assert first.status_code == 200, first.text
    assert turns(vision) == [[{"type": "text", "text": "What is this?"}, {"type": "image"}]]
    for each in vision.encoders:
        each.files.clear()  # the gateway has kept it
    second = await post(vision, {"type": "input_text", "text": "Sure?"}, previous_response_id=first.json()["id"])
    assert second.status_code == 200, second.text
    assert len(vision.held(data)) == 1
    assert turns(vision)[0] == [{"type": "text", "text": "What is this?"}, {"type": "image"}]


@pytest.mark.parametrize("data", [SOUND + b"16000", SOUND + b"32000 " + LARGE])
async def test_the_next_response_finds_the_sound_again(vision: Vision, data: bytes) -> None:
    heard = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    first = await post(vision, ASKED, heard)
    assert first.status_code == 200, first.text
    assert turns(vision) == [[{"type": "text", "text": "What is this?"}, {"type": "audio", "audio": ""}]]
    for each in vision.encoders:
        each.files.clear()  # the gateway has kept it
    second = await post(vision, {"type": "input_text", "text": "Sure?"}, previous_response_id=first.json()["id"])
    assert second.status_code == 200, second.text
    assert len(vision.held(data)) == 1
    assert turns(vision)[0] == [{"type": "text", "text": "What is this?"}, {"type": "audio", "audio": ""}]
    assert {put.kind for each in vision.encoders for put in each.puts} == {AUDIO}


async def test_a_tool_may_return_an_image(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    items = [
        {"role": "user", "content": "Look."},
        {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [image(IMAGE)]},
    ]
    response = await vision.http.post("/v1/responses", json={"model": "fake", "input": items})
    assert response.status_code == 200, response.text
    assert turns(vision)[2] == [{"type": "image"}]


async def test_a_response_in_the_background_keeps_the_files_of_its_body(vision: Vision) -> None:
    body = {"model": "fake", "background": True, "input": [{"role": "user", "content": [image(LARGE)]}]}
    response = await vision.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    request = await vision.mesh.outputs.next_request()
    assert len(vision.held(LARGE)) == 1
    request.answer("blue")


async def test_a_conversation_keeps_its_images(vision: Vision) -> None:
    conversation = (await vision.http.post("/v1/conversations", json={})).json()["id"]
    first = await post(vision, ASKED, image(LARGE), conversation=conversation)
    assert first.status_code == 200, first.text
    second = await post(vision, ASKED, conversation=conversation)
    assert second.status_code == 200, second.text
    assert len(vision.chats[-1].media) == 1


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (image(b"bad"), "input[0].content[1].image_url"),
        ({"type": "input_image", "image_url": "data:,"}, "input[0].content[1].image_url"),
        ({"type": "input_image", "file_id": "file-1"}, "input[0].content[1].file_id"),
        ({"type": "input_image"}, "input[0].content[1].image_url"),
        ({"type": "input_audio"}, "input[0].content[1].input_audio"),
        ({"type": "input_audio", "uuid": "a"}, "input[0].content[1].input_audio"),
        ({"type": "input_image", "uuid": "a"}, "input[0].content[1].image_url"),
        ({"type": "input_audio", "input_audio": {"data": "!", "format": "mp3"}}, "input[0].content[1].input_audio"),
        (
            {"type": "input_audio", "input_audio": {"data": "YmFk", "format": "mp3"}},
            "input[0].content[1].input_audio",
        ),
        ({"type": "input_video", "input_video": {}}, "input[0].content[1].input_video"),
    ],
)
async def test_errors_name_the_part(vision: Vision, part: Any, field: str) -> None:
    response = await post(vision, ASKED, part, instructions="Be brief.")
    assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text


async def test_an_image_that_is_lost_is_named_by_the_response_that_had_it(vision: Vision) -> None:
    lost = f"data:image/png;sha256,{'0' * 64}"
    response = await post(vision, ASKED, {"type": "input_image", "image_url": lost})
    assert "not known any more" in response.json()["error"]["message"]

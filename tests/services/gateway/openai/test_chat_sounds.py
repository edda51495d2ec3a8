"""Sounds of OpenAI's chats: put at encoders as sounds, named by the tokenizer's items, and counted in the usage."""

import asyncio
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fake_encoders import AUDIO, IMAGE, SOUND, Vision, with_encoders
from tests.services.gateway.fakes import FakeMesh
from tokenloom.request import errors

SOUND_FILE = SOUND + b"16000"
LARGE = SOUND + b"32000 " + bytes(range(256)) * 800


def url(data: bytes) -> str:
    return f"data:audio/wav;base64,{base64.b64encode(data).decode()}"


def heard(data: bytes | str, coding: object = "wav", **members: Any) -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": coding}, **members}


async def post(http: httpx.AsyncClient, *parts: Any, **fields: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}
    return await http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("data", [SOUND_FILE, LARGE])
async def test_a_sound_goes_to_an_encoder_and_its_item_to_the_engine(vision: Vision, data: bytes) -> None:
    call = asyncio.create_task(post(vision.http, heard(data)))
    request = await vision.mesh.outputs.next_request()
    (index,) = vision.held(data)
    (chat,) = vision.chats
    assert json.loads(chat.messages_json)[0]["content"] == [
        {"type": "audio", "audio": ""},
        {"type": "text", "text": "What is this?"},
    ]
    (size,) = chat.media
    assert (size.kind, size.samples) == (AUDIO, 16_000 if data == SOUND_FILE else 32_000)
    (item,) = request.submit.prompt.media
    assert (item.kind, item.digest) == (AUDIO, hashlib.sha256(data).digest())
    assert item.encoder == vision.mesh.address(f"encoder-{index}")
    assert vision.encoders[index].puts[0].kind == AUDIO
    request.answer("rain")
    usage = (await call).json()["usage"]
    assert usage["prompt_tokens_details"]["audio_tokens"] == sum(run.num_tokens for run in item.runs) == 2


async def test_usage_without_sounds_counts_none(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["rain"]
    usage = (await post(vision.http)).json()["usage"]
    assert "audio_tokens" not in usage["prompt_tokens_details"]


async def test_vllms_form_is_the_same_file(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["rain"]
    for part in (
        heard(LARGE),
        {"type": "audio_url", "audio_url": {"url": url(LARGE)}},
        {"type": "audio_url", "audio_url": url(LARGE)},
        {"type": "audio_url", "audio_url": {"url": url(LARGE).replace("audio/wav", "video/webm")}},
    ):
        response = await post(vision.http, part)
        assert response.status_code == 200, response.text
    assert vision.num_puts == 1


async def test_urls_and_names(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["rain"]
    for each in vision.encoders:
        each.urls["https://example.org/a.wav"] = SOUND_FILE
    fetched = {"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}}
    assert (await post(vision.http, fetched)).status_code == 200
    assert {put.kind for each in vision.encoders for put in each.puts} == {AUDIO}
    assert (await post(vision.http, heard(LARGE, uuid="rain"))).status_code == 200
    again = {"type": "input_audio", "input_audio": None, "uuid": "rain"}
    assert (await post(vision.http, again)).status_code == 200
    refused = await post(vision.http, {"type": "audio_url", "audio_url": {"url": "https://example.org/b.wav"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "messages[0].content[0].audio_url")


@pytest.mark.parametrize(
    ("parts", "fields", "field", "message"),
    [
        ([heard(b"bad")], {}, "input_audio", "the file is no image"),
        ([heard("!")], {}, "input_audio", "not base64"),
        ([heard("")], {}, "input_audio.data", "the base64 of a sound"),
        ([heard(SOUND_FILE, "pcm16")], {}, "input_audio.format", "one of wav, mp3"),
        ([heard(SOUND_FILE, 3)], {}, "input_audio.format", "one of wav, mp3"),
        ([{"type": "input_audio", "input_audio": "AAAA"}], {}, "input_audio", '"format": "wav"'),
        ([{"type": "input_audio"}], {}, "input_audio", '"format": "wav"'),
        ([{"type": "audio_url", "audio_url": {"url": "data:image/png;base64,AAAA"}}], {}, "audio_url", "be a sound"),
        ([{"type": "audio_url", "audio_url": {"url": "file:///etc/passwd"}}], {}, "audio_url", "data: URL"),
        ([{"type": "audio_url"}], {}, "audio_url", "the URL of a sound: data:audio/"),
        ([{"type": "audio_url", "uuid": "gone"}], {}, "audio_url", "this sound is not known any more"),
        ([heard(SOUND_FILE)] * 3, {}, "input_audio", "may have 2 sounds, not 3"),
        ([{"type": "video", "video": "x"}], {}, "video", "as a part of type video_url"),
        ([heard(SOUND_FILE)], {"truncate_prompt_tokens": 5}, "", "not available with images and sounds"),
    ],
)
async def test_errors_name_the_clients_field(
    vision: Vision, parts: list[Any], fields: dict[str, Any], field: str, message: str
) -> None:
    response = await post(vision.http, *parts, **fields)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == (f"messages[0].content[0].{field}" if field else "truncate_prompt_tokens")
    assert message in error["message"]


async def test_images_do_not_count_as_sounds(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["rain"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert (await post(vision.http, *[image] * 4, *[heard(SOUND_FILE)] * 2)).status_code == 200


async def test_what_an_engine_says_of_a_sound_names_it(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, heard(SOUND_FILE), heard(LARGE)))
    (await vision.mesh.outputs.next_request()).fail(errors.InvalidArgument("it is damaged", "media[1]"))
    error = (await call).json()["error"]
    field = "messages[0].content[1].input_audio"
    assert (error["param"], error["message"]) == (field, f"{field}: it is damaged")


@pytest.mark.parametrize(
    ("kind", "part", "readable"),
    [
        (IMAGE, heard(SOUND_FILE), "text and images only"),
        (AUDIO, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "text and sounds only"),
    ],
)
async def test_a_model_of_one_kind_refuses_the_other(socket_dir: Path, kind: Any, part: Any, readable: str) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_encoders(mesh, kinds=[kind]), mesh.gateway(), mesh.http() as http:
        error = (await post(http, part)).json()["error"]
        assert f"reads {readable}" in error["message"]
        assert error["param"].startswith("messages[0].content[0].")


async def test_a_model_of_texts_refuses_sounds_by_name(http: httpx.AsyncClient) -> None:
    response = await post(http, heard(LARGE))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[0].input_audio")
    assert "reads text only" in error["message"]

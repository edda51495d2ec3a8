"""Videos of OpenAI's chats: put at encoders as videos, and named by the tokenizer's items."""

import asyncio
import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fake_encoders import AUDIO, IMAGE, VIDEO, Vision, with_encoders
from tests.services.gateway.fakes import FakeMesh
from tokenloom.services.gateway.records.media import read_options

CLIP = b"a clip"
LARGE = b"clip " + bytes(range(256)) * 800
PICTURES = ",".join(base64.b64encode(name).decode() for name in (b"one picture", b"another"))


def url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


def seen(address: str, **members: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": address}, **members}


async def post(http: httpx.AsyncClient, *parts: Any, **fields: Any) -> httpx.Response:
    content = [*parts, {"type": "text", "text": "What happens?"}]
    body = {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}
    return await http.post("/v1/chat/completions", json=body)


@pytest.mark.parametrize("data", [CLIP, LARGE])
async def test_a_video_goes_to_an_encoder_and_its_item_to_the_engine(vision: Vision, data: bytes) -> None:
    call = asyncio.create_task(post(vision.http, seen(url(data)), mm_processor_kwargs={"fps": 0.5, "max_pixels": 99}))
    request = await vision.mesh.outputs.next_request()
    (index,) = vision.held(data)
    (chat,) = vision.chats
    assert json.loads(chat.messages_json)[0]["content"] == [
        {"type": "video"},
        {"type": "text", "text": "What happens?"},
    ]
    (size,) = chat.media
    assert (size.kind, size.width, size.height, size.frames, size.frame_rate) == (VIDEO, 20, 10, 8, 4.0)
    assert size.options_json == b'{"fps":0.5,"max_pixels":99}'
    (item,) = request.submit.prompt.media
    assert (item.kind, item.digest) == (VIDEO, hashlib.sha256(data).digest())
    assert vision.encoders[index].puts[0].kind == VIDEO
    request.answer("rain")
    assert (await call).status_code == 200


async def test_another_form_is_the_same_file(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["rain"]
    for part in (
        seen(url(LARGE)),
        {"type": "video_url", "video_url": url(LARGE)},
        seen(url(LARGE).replace("video/mp4", "video/webm"), uuid="clip"),
        {"type": "video_url", "video_url": None, "uuid": "clip"},
    ):
        response = await post(vision.http, part)
        assert response.status_code == 200, response.text
    assert vision.num_puts == 1


@pytest.mark.parametrize("head", ["data:video/jpeg;base64,", "data:video/jpeg;fps=2;base64,"])
async def test_a_list_of_pictures_goes_to_the_encoder_as_it_is(vision: Vision, head: str) -> None:
    vision.mesh.outputs.auto = ["rain"]
    assert (await post(vision.http, seen(head + PICTURES))).status_code == 200
    assert vision.held((head + PICTURES).encode())


async def test_a_long_list_of_pictures(vision: Vision) -> None:
    """Of a body that is read while it arrives, a list stays as it is: it is no base64 of one file."""
    vision.mesh.outputs.auto = ["rain"]
    long = ",".join([base64.b64encode(LARGE).decode()] * 2)
    assert (await post(vision.http, seen(f"data:video/jpeg;base64,{long}"))).status_code == 200
    assert vision.held(f"data:video/jpeg;base64,{long}".encode())


async def test_a_picture_may_be_an_image_and_a_video(vision: Vision) -> None:
    """Each is put as what it is, though their bytes are the same."""
    vision.mesh.outputs.auto = ["rain"]
    data = base64.b64encode(CLIP).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}
    response = await post(vision.http, image, seen(f"data:video/jpeg;base64,{data}"))
    assert response.status_code == 200, response.text
    (chat,) = vision.chats
    assert [(size.kind, size.frames) for size in chat.media] == [(IMAGE, 0), (VIDEO, 8)]


@pytest.mark.parametrize(
    ("parts", "fields", "field", "message"),
    [
        ([seen("data:video/mp4;base64,!")], {}, "messages[0].content[0].video_url", "not base64"),
        ([seen("data:video/mp4;base64,")], {}, "messages[0].content[0].video_url", "holds no video"),
        ([seen("data:image/png;base64,AAAA")], {}, "messages[0].content[0].video_url", "must be a video"),
        ([seen("file:///etc/passwd")], {}, "messages[0].content[0].video_url", "data: URL"),
        ([{"type": "video_url"}], {}, "messages[0].content[0].video_url", "the URL of a video: data:video/"),
        ([seen("data:video/jpeg;base64,AAAA,,AAAA")], {}, "messages[0].content[0].video_url", "commas between"),
        (
            [seen("data:video/jpeg;base64," + "A," * 16384 + "A")],
            {},
            "messages[0].content[0].video_url",
            "at most 16,384",
        ),
        ([seen(f"data:video/jpeg;a={'b' * 60};base64,AA==,AA==")], {}, "messages[0].content[0].video_url", ";fps="),
        ([seen(url(CLIP))] * 2, {}, "messages[0].content[0].video_url", "may have 1 videos, not 2"),
        ([seen(url(b"bad"))], {}, "messages[0].content[0].video_url", "the file is no"),
        ([seen(url(CLIP))], {"mm_processor_kwargs": {"fps": "2"}}, "mm_processor_kwargs.fps", "number above 0"),
        ([seen(url(CLIP))], {"mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps", "number above 0"),
        ([seen(url(CLIP))], {"mm_processor_kwargs": {"num_frames": 1.5}}, "mm_processor_kwargs.num_frames", "whole"),
    ],
)
async def test_errors_name_the_clients_field(
    vision: Vision, parts: list[Any], fields: dict[str, Any], field: str, message: str
) -> None:
    response = await post(vision.http, *parts, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert message in error["message"]


@pytest.mark.parametrize("kinds", [[IMAGE], [AUDIO]])
async def test_a_model_that_is_shown_no_videos_refuses_them(socket_dir: Path, kinds: list[Any]) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_encoders(mesh, kinds=kinds), mesh.gateway(), mesh.http() as http:
        error = (await post(http, seen(url(CLIP)))).json()["error"]
    noun = {IMAGE: "images", AUDIO: "sounds"}[kinds[0]]
    assert (error["param"], f"reads text and {noun} only" in error["message"]) == (
        "messages[0].content[0].video_url",
        True,
    )


def test_options_are_canonical() -> None:
    assert read_options({"num_frames": 4, "fps": 2.0}) == b'{"fps":2,"num_frames":4}'

"""Images of OpenAI's chats: put at encoders, named by the tokenizer's items, and put again when an encoder is lost."""

import asyncio
import base64
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.gateway.fake_encoders import Vision, data_url, with_encoders
from tests.services.gateway.fakes import SOON, FakeMesh
from tokenloom.request import errors
from tokenloom.services.gateway.mesh import encoder_client
from tokenloom.services.gateway.records.media import KeptFiles, MediaPart
from tokenloom.services.runtime import liveness

IMAGE = b"an image"
LARGE = random.Random(3).randbytes(300_000)


def part(data: bytes | str, **members: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if isinstance(data, str) else data_url(data)}, **members}


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, *parts]
    return {"model": "fake", "messages": [{"role": "user", "content": content}], **fields}


async def post(http: httpx.AsyncClient, *parts: Any, **fields: Any) -> httpx.Response:
    return await http.post("/v1/chat/completions", json=body(*parts, **fields))


async def test_an_image_goes_to_an_encoder_and_its_item_to_the_engine(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, part(IMAGE), mm_processor_kwargs={"min_pixels": 9, "max_pixels": 99}))
    request = await vision.mesh.outputs.next_request()
    (index,) = vision.held(IMAGE)
    (chat,) = vision.chats
    assert json.loads(chat.messages_json)[0]["content"] == [
        {"type": "text", "text": "What is this?"},
        {"type": "image"},
    ]
    (size,) = chat.media
    assert (size.width, size.height, size.options_json) == (20, 10, b'{"max_pixels":99,"min_pixels":9}')
    (item,) = request.submit.prompt.media
    assert item.digest == hashlib.sha256(IMAGE).digest()
    assert item.encoder == vision.mesh.address(f"encoder-{index}")
    assert len(request.submit.SerializeToString()) < 2000, "no row and no file travels with a request"
    assert vision.encoders[index].puts[0].cache_salt == request.submit.prompt.cache_salt
    assert list(vision.encoders[index].pins) == [vision.encoders[index].puts[0].request_id]
    request.answer("blue")
    response = (await call).json()
    assert response["choices"][0]["message"]["content"] == "blue"
    assert response["usage"]["prompt_tokens"] == len(chat.messages_json)
    assert (
        await asyncio.wait_for(vision.encoders[index].released.get(), SOON) == vision.encoders[index].puts[0].request_id
    )


async def test_the_same_image_is_sent_once(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    for _ in range(2):
        assert (await post(vision.http, part(IMAGE), part(IMAGE), part(b"other"))).status_code == 200
    assert vision.num_puts == 2


async def test_large_images_of_a_large_body(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    sent = body(part(LARGE), part(LARGE[:200_000]), part(b"small"))
    response = await vision.http.post("/v1/chat/completions", json=sent)
    assert response.status_code == 200, response.text
    for data in (LARGE, LARGE[:200_000], b"small"):
        assert len(vision.held(data)) == 1


@pytest.mark.parametrize(
    ("parts", "fields", "field", "message"),
    [
        ([part(b"bad image")], {}, "messages[0].content[1].image_url", "the file is no image"),
        ([part(IMAGE), part(b"bad image")], {}, "messages[0].content[2].image_url", "the file is no image"),
        ([part("data:image/png;base64,!")], {}, "messages[0].content[1].image_url", "not base64"),
        ([part("data:image/png;base64,")], {}, "messages[0].content[1].image_url", "holds no image"),
        ([part("data:audio/wav;base64,AAAA")], {}, "messages[0].content[1].image_url", "must be an image"),
        ([part("file:///etc/passwd")], {}, "messages[0].content[1].image_url", "data: URL"),
        ([part("")], {}, "messages[0].content[1].image_url", "must be the URL of an image"),
        ([part(f"data:image/png;sha256,{'0' * 64}")], {}, "messages[0].content[1].image_url", "not known any more"),
        ([part("data:image/png;sha256,00")], {}, "messages[0].content[1].image_url", "not the SHA-256"),
        ([{"type": "image_url", "uuid": "sky"}], {}, "messages[0].content[1].image_url", "not known any more"),
        ([part(IMAGE, uuid="")], {}, "messages[0].content[1].uuid", "1 to 128 characters"),
        ([part(IMAGE)] * 5, {}, "messages[0].content[1].image_url", "may have 4 images, not 5"),
        ([part(IMAGE)], {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not available with images"),
        ([part(IMAGE)], {"mm_processor_kwargs": {"do_resize": 1}}, "mm_processor_kwargs.do_resize", "not supported"),
        ([part(IMAGE)], {"mm_processor_kwargs": {"max_pixels": "9"}}, "mm_processor_kwargs.max_pixels", "whole"),
        (
            [{"type": "image_url", "image_url": {"url": data_url(IMAGE), "detail": "huge"}}],
            {},
            "messages[0].content[1].image_url.detail",
            "one of auto, low, high",
        ),
    ],
)
async def test_errors_name_the_clients_field(
    vision: Vision, parts: list[Any], fields: dict[str, Any], field: str, message: str
) -> None:
    response = await post(vision.http, *parts, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field), error
    assert message in error["message"]


async def test_what_an_engine_says_of_an_image_names_it_too(vision: Vision) -> None:
    for stream in (False, True):
        call = asyncio.create_task(post(vision.http, part(IMAGE), part(LARGE), stream=stream))
        (await vision.mesh.outputs.next_request()).fail(errors.InvalidArgument("it is damaged", "media[1]"))
        response = await call
        assert response.status_code == 400
        error = response.json()["error"]
        field = "messages[0].content[2].image_url"
        assert (error["param"], error["message"]) == (field, f"{field}: it is damaged")


async def test_an_unknown_image_is_named_once(vision: Vision) -> None:
    error = (await post(vision.http, part(f"data:image/png;sha256,{'0' * 64}"))).json()["error"]
    assert error["message"].count("image_url") == 1


async def test_a_request_keeps_the_file_that_a_name_had(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    assert (await post(vision.http, part(IMAGE, uuid="sky"))).status_code == 200
    vision.mesh.outputs.auto = None
    call = asyncio.create_task(post(vision.http, {"type": "image_url", "image_url": None, "uuid": "sky"}))
    request = await vision.mesh.outputs.next_request()
    other = asyncio.create_task(post(vision.http, part(b"another", uuid="sky")))
    (await vision.mesh.outputs.next_request()).answer("red")
    assert (await other).status_code == 200
    request.fail(errors.MediaLost("the encoder did not answer"))
    again = await vision.mesh.outputs.next_request()
    assert [item.digest for item in again.submit.prompt.media] == [hashlib.sha256(IMAGE).digest()]
    again.answer("blue")
    assert (await call).status_code == 200


async def test_names_of_one_tenant_do_not_drop_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_client, "MAX_NAMES", 3)
    nothing: Any = None  # no file is placed
    client = encoder_client.EncoderClient(nothing, nothing, str, KeptFiles(0))
    shown = MediaPart("f", name="cat")
    client.note_name(shown, "quiet", b"1")
    for index in range(9):
        client.note_name(MediaPart("f", name=str(index % 5)), "loud", b"2")
    assert client.digest_of(shown, "quiet") == b"1"
    assert client.digest_of(MediaPart("f", name="3"), "loud") == b"2"
    with pytest.raises(errors.InvalidArgument, match="not known"):
        client.digest_of(MediaPart("f", name="4"), "quiet")


async def test_detail_is_taken_and_named(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    image = {"type": "image_url", "image_url": {"url": data_url(IMAGE), "detail": "low"}}
    response = await post(vision.http, image)
    assert response.status_code == 200
    assert response.headers["x-tokenloom-ignored"] == "messages[].content[].image_url.detail"


async def test_a_uuid_names_an_image_within_its_tenant(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    assert (await post(vision.http, part(IMAGE, uuid="sky"))).status_code == 200
    response = await post(vision.http, {"type": "image_url", "image_url": None, "uuid": "sky"})
    assert response.status_code == 200, response.text
    assert vision.num_puts == 1


async def test_a_uuid_names_what_was_fetched_from_a_url_too(vision: Vision) -> None:
    """Which encoder has the file is decided by the URL, and not by the file's digest."""
    vision.mesh.outputs.auto = ["blue"]
    for index in range(8):
        for each in vision.encoders:
            each.urls[f"https://example.org/{index}.png"] = f"image {index}".encode()
        shown = part(f"https://example.org/{index}.png", uuid=f"sky {index}")
        assert (await post(vision.http, shown)).status_code == 200
        response = await post(vision.http, {"type": "image_url", "image_url": None, "uuid": f"sky {index}"})
        assert response.status_code == 200, response.text


async def test_encoders_fetch_urls(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    for each in vision.encoders:
        each.urls["https://example.org/a.png"] = IMAGE
    assert (await post(vision.http, part("https://example.org/a.png"))).status_code == 200
    refused = await post(vision.http, part("https://example.org/b.png"))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "messages[0].content[1].image_url")


async def test_slow_hosts_do_not_delay_files_that_are_sent(vision: Vision) -> None:
    for each in vision.encoders:
        each.fetching.clear()
    fetched = asyncio.Semaphore(0)
    for each in vision.encoders:
        each.num_fetches = fetched
    calls = [
        asyncio.create_task(post(vision.http, part("https://example.com/a.png")))
        for _ in range(encoder_client.MAX_PUTS + 1)
    ]
    for _ in range(encoder_client.MAX_FETCHES - 1):
        await asyncio.wait_for(fetched.acquire(), SOON)
    vision.mesh.outputs.auto = ["blue"]
    assert (await asyncio.wait_for(post(vision.http, part(IMAGE)), SOON)).status_code == 200
    for each in vision.encoders:
        each.fetching.set()
    assert [(await call).status_code for call in calls] == [200] * len(calls)


async def test_files_of_a_lost_encoder_are_put_at_another(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, part(LARGE), part(IMAGE)))
    request = await vision.mesh.outputs.next_request()
    first, second = (vision.held(data)[0] for data in (LARGE, IMAGE))
    request.send("bl", [1, 2])
    vision.encoders[first].error = errors.Unavailable("gone")
    vision.encoders[first].files.clear()
    request.fail(errors.MediaLost("the encoder does not have the file"))
    again = await vision.mesh.outputs.next_request()
    assert {item.encoder for item in again.submit.prompt.media} == {vision.mesh.address(f"encoder-{1 - first}")}
    assert LARGE in vision.encoders[1 - first].files.values()
    assert [list(journal.token_ids) for journal in again.submit.journals] == [[1, 2]]
    again.send("ue", [3, 4])
    again.finish()
    assert (await call).json()["choices"][0]["message"]["content"] == "blue"
    assert second in (first, 1 - first)


async def test_a_resumed_answer_whose_files_are_lost_goes_on(vision: Vision) -> None:
    """Its engine asked for them while its gateway was away."""
    asked, path = json.dumps(body(part(IMAGE), stream=True)), "/v1/chat/completions"
    headers = {"content-type": "application/json", "last-event-id": "0"}

    async def first_event() -> str:
        async with (
            vision.mesh.http() as http,
            http.stream("POST", path, content=asked, headers=headers) as response,
        ):
            pieces = response.aiter_text()
            return (await anext(pieces)).partition("\n")[0].removeprefix("id: ")

    reading = asyncio.create_task(first_event())
    request = await vision.mesh.outputs.next_request()
    request.send("bl", [1])
    resumed = headers | {"last-event-id": await reading}
    call = asyncio.create_task(vision.http.post(path, content=asked, headers=resumed))
    kept, resume = await vision.mesh.outputs.next_resume()
    assert resume.request_id == request.submit.request_id
    for each in vision.encoders:
        each.files.clear()
    kept.send("bl", [1])
    kept.fail(errors.MediaLost("the encoder does not have the file"))
    again = await vision.mesh.outputs.next_request()
    assert [list(journal.token_ids) for journal in again.submit.journals] == [[1]]
    assert len(vision.held(IMAGE)) == 1, "they are put again"
    again.send("ue", [2])
    again.finish()
    text = (await call).text
    assert "ue" in text
    assert "[DONE]" in text


async def test_a_beam_search_goes_on_whose_files_are_lost(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, part(IMAGE), use_beam_search=True, n=2, max_tokens=4))
    request = await vision.mesh.outputs.next_request()
    for each in vision.encoders:
        each.files.clear()
    request.fail(errors.MediaLost("the encoder does not have the file"))
    again = await vision.mesh.outputs.next_request()
    assert again.submit.request_id == request.submit.request_id
    assert len(vision.held(IMAGE)) == 1
    call.cancel()
    await asyncio.wait_for(again.cancelled.wait(), SOON)


async def test_a_client_that_leaves_while_files_are_put_again(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, part(IMAGE)))
    request = await vision.mesh.outputs.next_request()
    (index,) = vision.held(IMAGE)
    encoder = vision.encoders[index]
    encoder.files.clear()
    encoder.answering.clear()
    encoder.asked.clear()
    request.fail(errors.MediaLost("the encoder does not have the file"))
    await asyncio.wait_for(encoder.asked.wait(), SOON)
    call.cancel()
    await asyncio.wait_for(encoder.was_left.wait(), SOON)
    encoder.answering.set()
    released = await asyncio.wait_for(encoder.released.get(), SOON)
    assert released == encoder.puts[0].request_id
    vision.mesh.outputs.auto = ["red"]
    assert (await post(vision.http, part(IMAGE))).status_code == 200, "the gateway goes on"
    assert released not in encoder.pins


async def test_without_an_encoder_the_answer_is_to_retry(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_client, "WAIT_SECONDS", 0.0)
    for each in vision.encoders:
        each.error = errors.Unavailable("gone")
    response = await post(vision.http, part(IMAGE))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_files_of_a_silent_encoder_are_put_at_another(vision: Vision, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness.answered, "__defaults__", (0.01,))
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.2)
    vision.mesh.outputs.auto = ["blue"]
    silent, other = vision.encoders
    silent.answering.clear()
    images = [b"image %d" % number for number in range(8)]  # some are the silent one's
    for data in images:
        assert (await post(vision.http, part(data))).status_code == 200
    assert [list(other.files.values()), list(silent.files.values())] == [images, []]


async def test_a_file_whose_channel_is_closed_is_put_at_another(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    addresses = {vision.mesh.address(f"encoder-{index}"): each for index, each in enumerate(vision.encoders)}
    left = encoder_client._ranked(list(addresses), hashlib.sha256(IMAGE).digest())[0]
    addresses[left].answering.clear()
    call = asyncio.create_task(post(vision.http, part(IMAGE)))
    await asyncio.wait_for(addresses[left].asked.wait(), SOON)
    service = vision.mesh.service
    assert service is not None
    assert service._started is not None
    client = service._started[0].first.generator._links.encoders
    assert client is not None
    await client._links.pop(left).channel.close(0)  # as that of an encoder that has left, after its time
    assert (await call).status_code == 200
    assert addresses[left].files == {}
    addresses[left].answering.set()


async def test_a_silent_encoder_holds_up_no_files_of_the_others(vision: Vision) -> None:
    vision.mesh.outputs.auto = ["blue"]
    silent, other = (vision.mesh.address(f"encoder-{index}") for index in range(2))

    def is_silents(data: bytes) -> bool:
        return encoder_client._ranked([silent, other], hashlib.sha256(data).digest())[0] == silent

    images = [b"image %d" % number for number in range(100)]
    stuck = list(filter(is_silents, images))[: encoder_client.MAX_PUTS + 1]
    (free, *_) = (data for data in images if not is_silents(data))
    vision.encoders[0].answering.clear()
    calls = [asyncio.create_task(post(vision.http, part(data))) for data in stuck]
    for _ in range(encoder_client.MAX_PUTS):
        await asyncio.wait_for(vision.encoders[0].num_asked.acquire(), SOON)
    assert (await post(vision.http, part(free))).status_code == 200
    assert not any(call.done() for call in calls)
    vision.encoders[0].answering.set()
    assert [(await call).status_code for call in calls] == [200] * len(calls)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_encoder_that_drains_gets_word_of_the_end(vision: Vision, is_lost: bool) -> None:
    call = asyncio.create_task(post(vision.http, part(IMAGE)))
    request = await vision.mesh.outputs.next_request()
    (index,) = vision.held(IMAGE)
    encoder = vision.encoders[index]
    encoder.lost_releases = int(is_lost)
    await vision.mesh.coordinator.drain_encoder(f"encoder-{index}")
    vision.mesh.outputs.auto = ["red"]
    while vision.held(b"another image") != [1 - index]:  # until the gateway knows it
        vision.encoders[index].files.clear()
        assert (await post(vision.http, part(b"another image"))).status_code == 200
    request.answer("blue")
    assert (await call).status_code == 200
    pinned = encoder.puts[0].request_id
    while await asyncio.wait_for(encoder.released.get(), SOON) != pinned:
        pass


async def test_files_that_are_lost_again_and_again_end_the_request(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, part(IMAGE)))
    for _ in range(6):
        request = await vision.mesh.outputs.next_request()
        for each in vision.encoders:
            each.files.clear()
        request.fail(errors.MediaLost("the encoder does not have the file"))
    response = await call
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")


async def test_a_client_that_leaves_takes_its_files_along(vision: Vision) -> None:
    call = asyncio.create_task(post(vision.http, part(IMAGE)))
    request = await vision.mesh.outputs.next_request()
    (index,) = vision.held(IMAGE)
    call.cancel()
    await asyncio.wait_for(request.cancelled.wait(), SOON)
    await asyncio.wait_for(vision.encoders[index].released.get(), SOON)
    assert not vision.encoders[index].pins


@pytest.mark.parametrize("data", [IMAGE, LARGE])
async def test_a_model_of_texts_refuses_images_by_name(http: httpx.AsyncClient, data: bytes) -> None:
    response = await post(http, part(data))
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages[0].content[1].image_url")
    assert "reads text only" in error["message"]


async def test_base64_where_no_image_is_read_is_refused(vision: Vision) -> None:
    response = await post(vision.http, part(IMAGE), metadata={"url": data_url(LARGE)})
    assert response.status_code == 400
    assert "where no image, video or sound is read" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
async def test_without_images_too(vision: Vision, path: str) -> None:
    messages = [{"role": "user", "content": "Look."}]
    asked = {"prompt": "Look."} if path == "/v1/completions" else {"messages": messages}
    sent = {"model": "fake", **asked, "metadata": {"data": base64.b64encode(LARGE).decode()}}
    response = await vision.http.post(path, json=sent)
    assert response.status_code == 400
    assert "where no image, video or sound is read" in response.json()["error"]["message"]


async def test_files_beyond_the_gateways_room_are_refused(socket_dir: Path) -> None:
    mesh = FakeMesh(socket_dir)
    gateway = mesh.gateway(max_media_bytes_in_flight=500_000, max_body_bytes=200_000)
    async with with_encoders(mesh), gateway, mesh.http() as http:
        call = asyncio.create_task(post(http, part(LARGE)))
        request = await mesh.outputs.next_request()
        full = await post(http, part(LARGE))
        assert (full.status_code, full.headers["retry-after"]) == (503, "1")
        request.answer("blue")
        assert (await call).status_code == 200
        mesh.outputs.auto = ["blue"]
        assert (await post(http, part(LARGE))).status_code == 200, "the answer has given its room back"
        assert (await post(http, part(LARGE * 2))).status_code == 413
        assert (await post(http, text="x" * 250_000)).status_code == 413

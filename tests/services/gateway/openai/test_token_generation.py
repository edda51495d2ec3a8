"""Images and sounds beside prompts in token ids: rendered, and taken back by ``/inference/v1/generate``."""

import asyncio
import hashlib
from typing import Any

import httpx
import pytest

from tests.services.gateway.fake_encoders import SOUND, Vision, data_url
from tests.services.gateway.fakes import LIMITS, SOON
from tests.services.gateway.openai.test_chat_images import LARGE, body, part
from tests.services.gateway.openai.test_chat_sounds import heard

IMAGE, OTHER = b"an image", b"other"


def hexed(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def render(http: httpx.AsyncClient, *parts: Any, **fields: Any) -> dict[str, Any]:
    response = await http.post("/v1/chat/completions/render", json=body(*parts, **fields))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def generate(vision: Vision, asked: dict[str, Any]) -> Any:
    """Return the output processor's request of a generation, which is answered."""
    call = asyncio.create_task(vision.http.post("/inference/v1/generate", json=asked))
    waiting = asyncio.create_task(vision.mesh.outputs.next_request())
    await asyncio.wait((call, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), call.result().text
    request = waiting.result()
    request.answer("blue")
    response = await call
    assert response.status_code == 200, response.text
    return request.submit


async def test_a_rendered_chat_names_its_images(vision: Vision) -> None:
    asked = await render(vision.http, part(IMAGE), part(OTHER), mm_processor_kwargs={"max_pixels": 99})
    assert asked["features"] == {
        "mm_hashes": {"image": [hexed(IMAGE), hexed(OTHER)]},
        "mm_placeholders": {"image": [{"offset": 0, "length": 2}, {"offset": 2, "length": 2}]},
        "kwargs_data": None,
        "mm_metadata": None,
    }
    assert asked["mm_processor_kwargs"] == {"max_pixels": 99}
    assert bytes(asked["token_ids"]) == vision.chats[-1].messages_json
    for encoder in vision.encoders:  # nothing is held once it is answered
        while encoder.pins:
            await asyncio.wait_for(encoder.released.get(), SOON)
    assert vision.mesh.outputs.requests.empty()
    assert (await render(vision.http))["features"] is None


async def test_a_rendered_chat_is_generated_as_the_chat_itself(vision: Vision) -> None:
    """By the digests alone: the encoders still have the files."""
    asked = await render(vision.http, part(IMAGE), part(OTHER), mm_processor_kwargs={"max_pixels": 99}, seed=3)
    puts = vision.num_puts
    tokens = await generate(vision, asked)
    call = asyncio.create_task(
        vision.http.post(
            "/v1/chat/completions",
            json=body(part(IMAGE), part(OTHER), mm_processor_kwargs={"max_pixels": 99}, seed=3),
        )
    )
    request = await vision.mesh.outputs.next_request()
    request.answer("blue")
    assert (await call).status_code == 200
    assert vision.num_puts == puts, "no file is sent again"
    assert tokens.prompt == request.submit.prompt
    assert tokens.block_hash_prefixes == request.submit.block_hash_prefixes
    assert [item.options_json for item in tokens.prompt.media] == [b'{"max_pixels":99}'] * 2


async def test_files_go_with_the_tokens_where_encoders_have_dropped_them(vision: Vision) -> None:
    asked = await render(vision.http, part(LARGE), part(IMAGE))
    for encoder in vision.encoders:
        encoder.files.clear()
    lost = await vision.http.post("/inference/v1/generate", json=asked)
    assert lost.status_code == 400
    assert lost.json()["error"]["param"].startswith("features.mm_hashes.image["), "whichever was asked for first"
    assert "is not known any more; send its bytes" in lost.text
    parts = [{"type": "image_url", "url": data_url(each)} for each in (LARGE, IMAGE)]
    tokens = await generate(vision, asked | {"features": None, "content_parts": parts})
    assert [item.digest.hex() for item in tokens.prompt.media] == [hexed(LARGE), hexed(IMAGE)]


async def test_sounds_have_a_name_of_their_own(vision: Vision) -> None:
    sound = SOUND + b"160"
    asked = await render(vision.http, heard(sound))
    assert asked["features"]["mm_hashes"] == {"audio": [hexed(sound)]}
    tokens = await generate(vision, asked)
    assert tokens.prompt.media[0].digest.hex() == hexed(sound)


async def test_an_output_without_a_limit_takes_what_the_prompt_leaves(vision: Vision) -> None:
    """With an image and without: the answer of a rendered chat does not end after a completion's 16 tokens."""
    plain = {"token_ids": list(b"abcd"), "sampling_params": {}}
    alone = await generate(vision, plain)
    beside = await generate(vision, plain | {"content_parts": [{"type": "image_url", "url": data_url(IMAGE)}]})
    rest = LIMITS.max_model_len - 4
    assert alone.sampling_params.max_tokens == beside.sampling_params.max_tokens == rest > 16


async def test_a_prompt_that_is_too_long_is_refused_before_its_images_are_read(vision: Vision) -> None:
    part = {"type": "image_url", "url": data_url(IMAGE)}
    asked = {"token_ids": [1] * LIMITS.max_model_len, "sampling_params": {"max_tokens": 3}, "content_parts": [part]}
    response = await vision.http.post("/inference/v1/generate", json=asked)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not vision.num_puts
    assert not vision.chats


async def test_an_image_may_be_fetched_and_named(vision: Vision) -> None:
    first = {"type": "image_url", "url": "https://example.com/a.png", "uuid": "mine"}
    plain = {"token_ids": list(b"abcd"), "sampling_params": {"max_tokens": 3}}
    one = await generate(vision, plain | {"content_parts": [first]})
    two = await generate(vision, plain | {"content_parts": [{"type": "image_url", "uuid": "mine"}]})
    assert one.prompt.media[0].digest == two.prompt.media[0].digest == hashlib.sha256(b"an image").digest()


ONE = {"mm_hashes": {"image": ["0" * 64]}, "mm_placeholders": {"image": [{"offset": 0, "length": 2}]}}
PART = {"type": "image_url", "url": data_url(IMAGE)}


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"features": ONE, "content_parts": [PART]}, "content_parts", "exclude each other"),
        ({"features": ONE | {"kwargs_data": {"image": ["AAAA"]}}}, "features.kwargs_data", "send content_parts"),
        ({"features": ONE | {"mm_metadata": {"image": ["AAAA"]}}}, "features.mm_metadata", "is not taken"),
        ({"features": ONE | {"mm_placeholders": {}}}, "features.mm_placeholders", "0 places for 1 of image"),
        ({"features": ONE | {"mm_hashes": {}}}, "features.mm_placeholders.image", "has no mm_hashes"),
        ({"features": {"mm_hashes": {"smell": []}, "mm_placeholders": {}}}, "features.mm_hashes.smell", "known are"),
        ({"features": ONE | {"mm_hashes": {"image": ["ab"]}}}, "features.mm_hashes.image[0]", "SHA-256"),
        ({"content_parts": [{"type": "file_url", "url": "data:,"}]}, "content_parts[0].type", "file_url"),
        ({"content_parts": [{"type": "image_url"}]}, "content_parts[0].url", "must be the URL of an image"),
        ({"content_parts": [PART] * 5}, "content_parts[0].url", "may have 4 images, not 5"),
        ({"content_parts": [PART], "token_ids": ["a"]}, "token_ids", "must hold token ids"),
        ({"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs", "needs features or content_parts"),
    ],
)
async def test_what_names_no_image_is_refused(vision: Vision, fields: dict[str, Any], field: str, reason: str) -> None:
    plain = {"token_ids": list(b"abcd"), "sampling_params": {"max_tokens": 3}}
    response = await vision.http.post("/inference/v1/generate", json=plain | fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field, response.text
    assert reason in response.json()["error"]["message"]


async def test_a_place_that_the_prompt_has_elsewhere_is_refused(vision: Vision) -> None:
    asked = await render(vision.http, part(IMAGE))
    asked["features"]["mm_placeholders"]["image"][0]["offset"] = 1
    response = await vision.http.post("/inference/v1/generate", json=asked)
    assert response.status_code == 400
    assert "it is at 1, of 2 tokens, but the prompt has it at 0, of 2" in response.json()["error"]["message"]


async def test_images_of_another_tenant_are_not_found(vision: Vision) -> None:
    """The digest alone opens nothing: files are held by tenant and salt."""
    asked = await render(vision.http, part(IMAGE))
    response = await vision.http.post("/inference/v1/generate", json=asked | {"cache_salt": "another"})
    assert response.status_code == 400
    assert "is not known any more" in response.text

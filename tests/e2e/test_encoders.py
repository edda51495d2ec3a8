"""``serve`` starts encoders beside the engine for a model that reads images, and starts one again that was killed."""

import asyncio
import base64
import hashlib
import io
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import psutil
import pytest

from tests.checkpoints.vision_prompts import picture
from tests.checkpoints.whole_vision import write_whole_vision
from tokenloom.v1.encoder_pb2 import GetRequest, PutHeader, PutRequest
from tokenloom.v1.encoder_pb2_grpc import EncoderStub
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem


def _image(seed: int = 0) -> bytes:
    data = io.BytesIO()
    picture(200, 120, seed).save(data, "PNG")
    return data.getvalue()


DATA = _image()
NUM_IMAGES = 12
DIGEST = hashlib.sha256(DATA).digest()


def _put() -> Iterator[PutRequest]:
    yield PutRequest(header=PutHeader(kind=MEDIA_KIND_IMAGE, digest=DIGEST, num_bytes=len(DATA)))
    yield PutRequest(data=DATA)


def _rows(address: str) -> list[bytes]:
    item = MediaItem(key=b"key", kind=MEDIA_KIND_IMAGE, num_rows=16, digest=DIGEST)
    with grpc.insecure_channel(address, options=[("grpc.default_authority", "localhost")]) as channel:
        stub = EncoderStub(channel)
        stub.Put(_put(), timeout=60)
        return [chunk.rows for chunk in stub.Get(GetRequest(item=item), timeout=60)]


@pytest.fixture(scope="module")
def mesh(serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = write_whole_vision("llava", tmp_path_factory.mktemp("encoders"))
    return serve(str(model), "--worker", "hash", "--encoders", "2")


def _encoders(mesh: Any) -> dict[str, dict[str, Any]]:
    return {f"encoder-{part['index']}": part for part in mesh.ps() if part["service"] == "encoder"}


def test_an_encoder_that_was_killed_is_started_again(mesh: Any) -> None:
    parts = _encoders(mesh)
    assert [part["health"] for part in parts.values()] == ["SERVING"] * 2, mesh.log.read_text()
    rows = [_rows(part["address"]) for part in parts.values()]
    assert rows[0] == rows[1]
    assert len(rows[0][0]) == 16 * 64 * 4

    victim = psutil.Process(parts["encoder-0"]["pid"])
    helpers = victim.children()
    assert helpers
    victim.kill()
    psutil.wait_procs(helpers, timeout=60)
    assert not [each for each in helpers if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    _wait_replaced(mesh, "encoder-0", victim.pid)
    assert _rows(parts["encoder-0"]["address"]) == rows[0]


async def _answer(client: openai.AsyncOpenAI, number: int, salt: str) -> str:
    """Ask about an image; with a salt of its own its rows are computed again."""
    url = f"data:image/png;base64,{base64.b64encode(_image(number)).decode()}"
    parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    answer = await client.chat.completions.create(
        model="llava",
        messages=[{"role": "user", "content": parts}],
        max_tokens=20,
        extra_body={"cache_salt": salt, "ignore_eos": True},
    )
    return str(answer.choices[0].message.content)


def _client(mesh: Any, retries: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=retries, timeout=120)


async def test_no_request_fails_when_encoders_are_killed(mesh: Any) -> None:
    async with _client(mesh, 4) as client:
        expected = await asyncio.gather(*(_answer(client, number, "first") for number in range(NUM_IMAGES)))
        assert len(set(expected)) == NUM_IMAGES, "each answer depends on its image"
        for index in range(2):
            asking = [asyncio.create_task(_answer(client, number, f"{index}")) for number in range(NUM_IMAGES)]
            await asking[0]  # others are on their way
            victim = _encoders(mesh)[f"encoder-{index}"]
            psutil.Process(victim["pid"]).kill()
            assert await asyncio.gather(*asking) == expected
            await asyncio.to_thread(_wait_replaced, mesh, f"encoder-{index}", victim["pid"])


async def test_no_request_fails_when_an_encoder_stops(mesh: Any) -> None:
    """It is asked for rows, for files that it has, and for new ones while it is stopped."""
    async with _client(mesh, 0) as client:
        expected = await asyncio.gather(*(_answer(client, number, "first") for number in range(NUM_IMAGES)))
        asking = [asyncio.create_task(_answer(client, number, "stopped")) for number in range(NUM_IMAGES)]
        await asking[0]
        victim = psutil.Process(_encoders(mesh)["encoder-0"]["pid"])
        victim.suspend()
        try:
            asking += [asyncio.create_task(_answer(client, number, "later")) for number in range(NUM_IMAGES)]
            assert await asyncio.gather(*asking) == expected * 2
        finally:
            victim.resume()


def _wait_replaced(mesh: Any, name: str, pid: int) -> None:
    while (found := _encoders(mesh)[name])["health"] != "SERVING" or found["pid"] == pid:
        pass  # `ps` takes its time; pytest's timeout bounds the wait

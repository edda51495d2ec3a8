"""Images of the Responses API that a client has uploaded, and names by the ids of their files."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.fake_encoders import Vision, with_encoders
from tests.services.gateway.fakes import FakeMesh

IMAGE = bytes(range(256)) * 800


@pytest.fixture
async def desk(socket_dir: Path, tmp_path: Path) -> AsyncIterator[Vision]:
    """A gateway that keeps files."""
    mesh = FakeMesh(socket_dir)
    mesh.outputs.auto = ["blue"]
    keys = {"api_key": ("a", "b"), "batch_dir": tmp_path / "batches"}
    async with with_encoders(mesh, 2) as encoders, mesh.gateway(**keys), mesh.http(headers=by("a")) as http:
        yield Vision(mesh, encoders, http)


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def upload(desk: Vision, purpose: str = "vision", data: bytes = IMAGE) -> str:
    form = {"files": {"file": ("a.png", data)}, "data": {"purpose": purpose}}
    response = await desk.http.post("/v1/files", **form)
    assert (response.status_code, response.json()["purpose"]) == (200, purpose)
    file_id: str = response.json()["id"]
    return file_id


async def ask(desk: Vision, *parts: Any, key: str = "a", **fields: Any) -> Any:
    body = {"model": "fake", "input": [{"role": "user", "content": [*parts]}], **fields}
    return await desk.http.post("/v1/responses", json=body, headers=by(key))


@pytest.mark.parametrize("purpose", ["vision", "user_data"])
async def test_an_uploaded_image_goes_to_an_encoder_that_needs_it(desk: Vision, purpose: str) -> None:
    file_id = await upload(desk, purpose)
    first = await ask(desk, {"type": "input_image", "file_id": file_id, "detail": "auto"})
    assert first.status_code == 200, first.text
    assert len(desk.held(IMAGE)) == 1
    assert (await ask(desk, {"type": "input_image", "file_id": file_id})).status_code == 200
    assert desk.num_puts == 1, "the encoder has it"

    for each in desk.encoders:
        each.files.clear()
    text = {"type": "input_text", "text": "Sure?"}
    second = await ask(desk, text, previous_response_id=first.json()["id"])
    assert second.status_code == 200, second.text
    assert len(desk.held(IMAGE)) == 1


async def test_conversations_name_uploaded_images_too(desk: Vision) -> None:
    item = {"role": "user", "content": [{"type": "input_image", "file_id": await upload(desk)}]}
    made = await desk.http.post("/v1/conversations", json={"items": [item]})
    assert made.status_code == 200, made.text
    answer = await ask(desk, {"type": "input_text", "text": "What is it?"}, conversation=made.json()["id"])
    assert answer.status_code == 200, answer.text
    assert len(desk.held(IMAGE)) == 1


async def test_what_is_refused(desk: Vision) -> None:
    file_id, lines = await upload(desk), await upload(desk, "batch", b"{}\n")
    named = {"type": "input_image", "file_id": file_id}
    field = "input[0].content[0].file_id"
    for part, key, status in (
        ({**named, "file_id": lines}, "a", 400),
        ({**named, "file_id": "file-1"}, "a", 404),
        (named, "b", 404),  # another tenant's
        ({**named, "file_id": 1}, "a", 400),
        ({**named, "image_url": "https://example.com/a.png"}, "a", 400),
    ):
        response = await ask(desk, part, key=key)
        assert (response.status_code, response.json()["error"]["param"]) == (status, field), response.text
    assert not desk.num_puts
    assert (await desk.http.delete(f"/v1/files/{file_id}")).status_code == 200
    assert (await ask(desk, named)).status_code == 404


async def test_a_file_that_is_gone_from_the_disk_is_not_found(desk: Vision, tmp_path: Path) -> None:
    file_id = await upload(desk)
    (tmp_path / "batches" / "files" / file_id).unlink()
    response = await ask(desk, {"type": "input_image", "file_id": file_id})
    assert (response.status_code, response.json()["error"]["param"]) == (404, "input[0].content[0].file_id")

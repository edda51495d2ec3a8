"""A request whose body has files is held as it came."""

import asyncio
from pathlib import Path

import pytest

from tests.services.gateway.fake_encoders import data_url, with_encoders
from tests.services.gateway.fakes import MODEL, FakeMesh
from tests.services.gateway.http.server.held_server import connection, received
from tokenloom.services.gateway.http import held_table
from tokenloom.services.gateway.http.held_table import HeldTable


async def test_an_answer_about_a_large_image_goes_on_at_another_gateway(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request is held as it came: the digest in its body says nothing elsewhere."""
    table = HeldTable(4)
    monkeypatch.setattr(held_table, "HeldTable", lambda num_slots: table)
    mesh, url = FakeMesh(socket_dir), data_url(bytes(range(256)) * 800)
    content = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]}
    async with with_encoders(mesh) as encoders, mesh.gateway(hold_connections=str(socket_dir)), mesh.http() as http:
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        begun = await mesh.outputs.next_request()
        (record,) = [each for each in table.records() if each.past.is_known]
        past = record.rest(record.base)
        assert past is not None
        assert mesh.service is not None
        assert mesh.service._started is not None
        encoders[0].files.clear()
        with connection() as (ours, client):
            assert await mesh.service._started[1].take(past, ours) == "not_begun"
            again = await mesh.outputs.next_request()
            assert again.submit.take_over
            for name in ("request_id", "fingerprint", "sampling_params", "prompt"):
                assert getattr(again.submit, name) == getattr(begun.submit, name)
            assert len(encoders[0].files) == 1
            again.answer("blue")
            assert b"blue" in await received(client, b"0\r\n\r\n")
        begun.answer("blue")
        assert "blue" in (await call).text

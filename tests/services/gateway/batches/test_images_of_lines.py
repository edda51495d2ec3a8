"""A line of a batch may show images and play sounds: its file holds them, whenever it is answered."""

import asyncio
import base64
import json
from pathlib import Path

from tests.services.gateway.fake_encoders import SOUND, Vision, data_url, with_encoders
from tests.services.gateway.fakes import SOON, FakeMesh

IMAGE, LARGE = b"an image", bytes(range(256)) * 800
HEARD = SOUND + b"16000 " + LARGE


def _line(name: str, data: bytes) -> str:
    content = [{"type": "image_url", "image_url": {"url": data_url(data)}}, {"type": "text", "text": "What is this?"}]
    body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


def _heard(name: str, data: bytes) -> str:
    heard = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}
    body = {"model": "fake", "messages": [{"role": "user", "content": [heard]}]}
    return json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body})


async def test_lines_show_their_images_and_sounds(socket_dir: Path, tmp_path: Path) -> None:
    mesh = FakeMesh(socket_dir)
    async with with_encoders(mesh) as encoders, mesh.gateway(batch_dir=str(tmp_path)), mesh.http() as http:
        mesh.outputs.auto = ["blue"]
        vision = Vision(mesh, encoders, http)
        lines = "\n".join([_line("one", IMAGE), _line("two", LARGE), _heard("three", HEARD)]).encode()
        sent = await http.post("/v1/files", files={"file": ("b.jsonl", lines)}, data={"purpose": "batch"})
        begun = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=begun)).json()
        async with asyncio.timeout(SOON):
            while batch["status"] not in ("completed", "failed"):
                await asyncio.sleep(0)
                batch = (await http.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}, batch
        assert len(vision.held(IMAGE)) == len(vision.held(LARGE)) == len(vision.held(HEARD)) == 1

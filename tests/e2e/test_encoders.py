"""``serve`` starts encoders beside the engine for a model that reads images, and starts one again that was killed."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.checkpoints.vision_prompts import picture
from tests.checkpoints.whole_vision import write_whole_vision
from tokenloom.v1.encoder_pb2 import GetRequest, PutHeader, PutRequest
from tokenloom.v1.encoder_pb2_grpc import EncoderStub
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem


def _image() -> bytes:
    data = io.BytesIO()
    picture(200, 120).save(data, "PNG")
    return data.getvalue()


DATA = _image()
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


def test_encoders_of_a_mesh(serve: Any, tmp_path: Path) -> None:
    model = write_whole_vision("llava", tmp_path)
    mesh = serve(str(model), "--worker", "hash", "--encoders", "2")

    def encoders() -> dict[str, dict[str, Any]]:
        return {f"encoder-{part['index']}": part for part in mesh.ps() if part["service"] == "encoder"}

    parts = encoders()
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
    with pytest.raises(grpc.RpcError):
        _rows(f"{parts['encoder-0']['address']}.gone")
    while (found := encoders()["encoder-0"])["health"] != "SERVING" or found["pid"] == victim.pid:
        pass  # `ps` takes its time; pytest's timeout bounds the wait
    assert _rows(found["address"]) == rows[0]

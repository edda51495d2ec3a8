"""A whole encoder: files go in, rows come out, and processes that end are replaced."""

import contextlib
import hashlib
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.checkpoints.vision_prompts import picture
from tests.checkpoints.whole_vision import write_whole_vision
from tests.ready_channel import ready_channel
from tokenloom.gpu_worker.towers.processor import Processor
from tokenloom.gpu_worker.towers.tower import Tower
from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.service import EncoderService
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.encoder_pb2 import (
    GetEncoderInfoRequest,
    GetRequest,
    PutHeader,
    PutRequest,
    PutResponse,
    RowChunk,
    RowType,
)
from tokenloom.v1.encoder_pb2_grpc import EncoderStub
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem


def png(image: Image.Image) -> bytes:
    data = io.BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


IMAGE = png(picture(200, 120))


@contextlib.asynccontextmanager
async def serving(checkpoint: Path, socket_dir: Path, **options: Any) -> AsyncIterator[EncoderStub]:
    settings = EncoderSettings.of(
        model=str(checkpoint), listen=f"unix:{socket_dir}/e", metrics_listen="", drain_timeout=0, **options
    )
    async with running(EncoderService(settings), settings) as host, ready_channel(host.address) as channel:
        yield EncoderStub(channel)


def messages(data: bytes, **header: Any) -> Iterator[PutRequest]:
    values = {"kind": MEDIA_KIND_IMAGE, "digest": hashlib.sha256(data).digest(), "num_bytes": len(data)}
    yield PutRequest(header=PutHeader(**cast(Any, values | {"request_id": "r", "tenant": "t"} | header)))
    for first in range(0, len(data), 1000):
        yield PutRequest(data=data[first : first + 1000])


async def put(stub: EncoderStub, data: bytes, **header: Any) -> PutResponse:
    return await stub.Put(messages(data, **header))


def item(data: bytes, num_rows: int = 16, **values: Any) -> MediaItem:
    digest = hashlib.sha256(data).digest()
    return MediaItem(key=digest + bytes([num_rows]), kind=MEDIA_KIND_IMAGE, num_rows=num_rows, digest=digest, **values)


async def rows_of(stub: EncoderStub, asked: MediaItem, first_row: int = 0) -> "np.ndarray[Any, np.dtype[np.float32]]":
    chunks: list[RowChunk] = [chunk async for chunk in stub.Get(GetRequest(item=asked, first_row=first_row))]
    assert all(chunk.type == RowType.ROW_TYPE_FLOAT32 for chunk in chunks)
    return np.concatenate([np.frombuffer(chunk.rows, np.float32).reshape(-1, chunk.width) for chunk in chunks])


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await call
    return failure.value.code()


def workers(module: str) -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if f"tokenloom.services.encoder.{module}" in each.cmdline()]


async def test_rows_are_those_of_the_tower(tmp_path: Path, socket_dir: Path) -> None:
    checkpoint = write_whole_vision("llava", tmp_path)
    expected = Tower(checkpoint).rows(Processor(checkpoint).pixels(IMAGE))
    async with serving(checkpoint, socket_dir) as stub:
        facts = await put(stub, IMAGE)
        assert (facts.width, facts.height, facts.num_bytes) == (200, 120, len(IMAGE))
        rows = await rows_of(stub, item(IMAGE))
        assert rows.tolist() == expected.tolist()
        assert (await rows_of(stub, item(IMAGE), 10)).tolist() == expected[10:].tolist()
        info = await stub.GetEncoderInfo(GetEncoderInfoRequest())
        assert (info.encoded, info.row_width) == (1, 64)
        for process in ("decode_worker", "tower_worker"):
            for each in workers(process):
                each.kill()
                each.wait()
        other = png(picture(120, 200, 1))
        await put(stub, other)
        assert len(await rows_of(stub, item(other))) == 16

        refused = await code_of(rows_of(stub, item(IMAGE, 17)))
        assert refused is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(rows_of(stub, item(b"never put"))) is grpc.StatusCode.NOT_FOUND
        damaged = IMAGE[: len(IMAGE) // 2]
        await put(stub, damaged)  # its header is as it should be
        assert await code_of(rows_of(stub, item(damaged))) is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_model_without_a_tower_ends_the_start(socket_dir: Path) -> None:
    settings = EncoderSettings.of(model=DEMO_MODEL_NAME, listen=f"unix:{socket_dir}/e", metrics_listen="")
    with pytest.raises(InvalidArgument):
        async with running(EncoderService(settings), settings):
            pass

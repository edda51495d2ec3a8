"""A whole encoder: files go in, rows come out, and processes that end are replaced."""

import contextlib
import hashlib
import io
import json
import struct
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import numpy as np
import psutil
import pytest
from PIL import Image

from tests.checkpoints.vision_prompts import picture
from tests.checkpoints.whole_sound import write_whole_sound
from tests.checkpoints.whole_vision import write_whole_vision
from tests.gpu_worker.towers.sound_files import KINDS, encoded, flac_bomb, tone
from tests.gpu_worker.towers.video_files import listed, shades, video
from tests.ready_channel import ready_channel
from tokenloom.gpu_worker.towers.processor import Processor
from tokenloom.gpu_worker.towers.sound_file import read_sound
from tokenloom.gpu_worker.towers.sound_processor import SoundProcessor
from tokenloom.gpu_worker.towers.sound_tower import SoundTower
from tokenloom.gpu_worker.towers.tower import Tower
from tokenloom.model_files.checkpoint import digest_of
from tokenloom.model_files.model_path import DEMO_MODEL_NAME
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.encoder import service, sound_files
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.service import EncoderService
from tokenloom.services.runtime.host.service import running
from tokenloom.v1.encoder_pb2 import (
    GetEncoderInfoRequest,
    GetRequest,
    HasRequest,
    PutHeader,
    PutRequest,
    PutResponse,
    RowChunk,
    RowType,
)
from tokenloom.v1.encoder_pb2_grpc import EncoderStub
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO, MediaItem


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


def sound_item(file: bytes, num_rows: int, start: int, num: int) -> MediaItem:
    digest = hashlib.sha256(file).digest()
    options = b'{"samples":%d,"start":%d}' % (num, start)
    return MediaItem(
        key=digest + options, kind=MEDIA_KIND_AUDIO, num_rows=num_rows, digest=digest, options_json=options
    )


async def test_rows_of_sounds_are_those_of_the_tower(tmp_path: Path, socket_dir: Path) -> None:
    checkpoint = write_whole_sound("qwen2_audio", tmp_path)
    processor, tower = SoundProcessor(checkpoint), SoundTower(checkpoint)
    async with serving(checkpoint, socket_dir) as stub:
        for kind in KINDS:
            container, codec = KINDS[kind]
            rate = 48_000 if "opus" in codec else 44_100
            file = encoded(tone(1.5, rate), container, codec, rate)
            facts = await put(stub, file, kind=MEDIA_KIND_AUDIO)
            samples = read_sound(file)
            assert facts.samples == len(samples)
            expected = tower.rows(processor.features(samples[1000:17_000]))
            assert (await rows_of(stub, sound_item(file, 25, 1000, 16_000))).tolist() == expected.tolist()

        for process in ("sound_worker", "tower_worker"):
            for each in workers(process):
                each.kill()
                each.wait()
        assert len(await rows_of(stub, sound_item(file, 25, 0, 16_000))) == 25
        for refused, why in ((b"#EXTM3U\nfile:///etc/passwd\n", "is not one of"), (file[:90], "damaged or incomplete")):
            with pytest.raises(grpc.aio.AioRpcError, match=why) as failure:
                await put(stub, refused, kind=MEDIA_KIND_AUDIO)
            assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        too_long = await code_of(rows_of(stub, sound_item(file, 25, 0, len(samples) + 1)))
        assert too_long is grpc.StatusCode.INVALID_ARGUMENT


class NoTower:
    """Stands for a process that computes rows, and takes seconds to start; nobody asks for rows."""

    width, row_type, num_places = 64, RowType.ROW_TYPE_FLOAT32, 1

    def __init__(self, path: str, settings: EncoderSettings, metrics: object, preparer: Any, *, hears: bool) -> None:
        self._preparer = preparer

    async def start(self) -> None:
        await self._preparer.start(())

    async def close(self) -> None:
        await self._preparer.close()


@pytest.fixture
def without_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "RowMaker", NoTower)


@pytest.mark.usefixtures("without_tower")
async def test_a_sound_takes_no_more_than_its_time(tmp_path: Path, socket_dir: Path) -> None:
    checkpoint = write_whole_sound("qwen2_audio", tmp_path)
    async with serving(checkpoint, socket_dir, sound_timeout=0.05) as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=r"more than 0\.05 s to decode"):
            await put(stub, flac_bomb(590), kind=MEDIA_KIND_AUDIO)
        info = await stub.GetEncoderInfo(GetEncoderInfoRequest())
        assert (info.sampling_rate, info.max_piece_samples, info.max_pixels) == (16_000, 480_000, 0)
        assert list(info.media_kinds) == [MEDIA_KIND_AUDIO]


@pytest.mark.usefixtures("without_tower")
async def test_a_long_sound_is_in_no_ones_memory(
    tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sound_files, "MEMORY_BYTES", 24 << 20)
    checkpoint, minutes = write_whole_sound("qwen2_audio", tmp_path), 20
    size = minutes * 60 * 32_000
    head = struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16, b"data", size)

    def arriving() -> Iterator[PutRequest]:
        yield PutRequest(header=PutHeader(kind=MEDIA_KIND_AUDIO))
        yield PutRequest(data=b"RIFF" + struct.pack("<I", 36 + size) + b"WAVE" + head)
        for _ in range(minutes * 60):
            yield PutRequest(data=bytes(32_000))

    async with serving(checkpoint, socket_dir) as stub:
        tracemalloc.start()
        try:
            facts = await stub.Put(arriving())
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert facts.samples == minutes * 60 * 16_000
    assert peak < facts.samples * 4 / 8, "of what its samples take"


CLIP = video(shades(12, 90, 70), rate=4)


def shown(data: bytes, frames: Sequence[int], height: int, width: int, num_rows: int) -> MediaItem:
    plan = json.dumps({"frames": list(frames), "height": height, "width": width}).encode()
    key = hashlib.sha256(data + plan).digest()
    digest = hashlib.sha256(data).digest()
    return MediaItem(key=key, kind=MEDIA_KIND_VIDEO, num_rows=num_rows, digest=digest, options_json=plan)


async def test_the_rows_of_a_video_are_those_of_the_tower(tmp_path: Path, socket_dir: Path) -> None:
    """Its processes start with the first video, open no file, and have no network."""
    checkpoint = write_whole_vision("qwen2_5_vl", tmp_path)
    (checkpoint / "video_preprocessor_config.json").write_text("{}")
    deciding = [checkpoint / f"{kind}preprocessor_config.json" for kind in ("", "video_")]
    plan = {"frames": [0, 3, 6, 9], "height": 56, "width": 84}
    expected = Tower(checkpoint).rows(Processor(checkpoint).frames(CLIP, plan))
    async with serving(checkpoint, socket_dir) as stub:
        info = await stub.GetEncoderInfo(GetEncoderInfoRequest())
        assert list(info.media_kinds) == [MEDIA_KIND_IMAGE, MEDIA_KIND_VIDEO]
        assert info.max_video_bytes == 64 << 20
        assert info.processor == digest_of(deciding), "what says how videos are prepared, too"
        before = {each.pid for each in workers("decode_worker")}
        facts = await put(stub, CLIP, kind=MEDIA_KIND_VIDEO)
        assert (facts.width, facts.height, facts.frames, facts.frame_rate) == (90, 70, 12, 4.0)
        rows = await rows_of(stub, shown(CLIP, [0, 3, 6, 9], 56, 84, 12))
        assert rows.tolist() == expected.tolist()
        started = [each for each in workers("decode_worker") if each.pid not in before]
        assert len(started) == 2
        assert all("torch" not in {Path(each.path).name for each in one.memory_maps()} for one in started)
        listed_facts = await put(stub, listed(shades(3)), kind=MEDIA_KIND_VIDEO)
        assert (listed_facts.frames, listed_facts.frame_rate) == (3, 0.0)


async def test_a_picture_is_an_image_and_a_video_of_one_frame(tmp_path: Path, socket_dir: Path) -> None:
    file = io.BytesIO()
    picture(64, 48).save(file, "JPEG")
    data = file.getvalue()
    async with serving(write_whole_vision("qwen2_vl", tmp_path), socket_dir) as stub:
        assert (await put(stub, data)).frames == 0
        for kind, number in ((MEDIA_KIND_IMAGE, [True]), (MEDIA_KIND_VIDEO, [False])):
            asked = HasRequest(tenant="t", digest=[hashlib.sha256(data).digest()], request_id="r", kind=kind)
            assert list((await stub.Has(asked)).has) == number
        assert (await put(stub, data, kind=MEDIA_KIND_VIDEO)).frames == 1
        assert len(await rows_of(stub, shown(data, [0], 56, 56, 4))) == 4


async def test_videos_that_are_not_taken(tmp_path: Path, socket_dir: Path) -> None:
    limits: dict[str, Any] = {"max_video_bytes": 1 << 20, "max_video_seconds": 5.0}
    async with serving(write_whole_vision("qwen2_vl", tmp_path), socket_dir, **limits) as stub:
        for data in (b"no video", CLIP[:300], video(shades(60), rate=10)):
            assert await code_of(put(stub, data, kind=MEDIA_KIND_VIDEO)) == grpc.StatusCode.INVALID_ARGUMENT
        large = put(stub, CLIP + bytes(2 << 20), kind=MEDIA_KIND_VIDEO)
        assert await code_of(large) == grpc.StatusCode.INVALID_ARGUMENT
        await put(stub, CLIP, kind=MEDIA_KIND_VIDEO)
        for frames, height, rows in (([30, 40], 56, 6), ([0], 57, 6), ([0, 3], 56, 7)):
            asked = shown(CLIP, frames, height, 84, rows)
            with pytest.raises(grpc.aio.AioRpcError, match=r"video|frame"):
                await rows_of(stub, asked)
        assert len(await rows_of(stub, shown(CLIP, [0, 3], 56, 84, 6))) == 6
    async with serving(write_whole_vision("llava", tmp_path / "other"), socket_dir) as stub:
        assert await code_of(put(stub, CLIP, kind=MEDIA_KIND_VIDEO)) == grpc.StatusCode.INVALID_ARGUMENT

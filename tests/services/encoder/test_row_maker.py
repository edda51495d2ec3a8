"""What the tower makes of what is ready for it: alone, together, and when one of them fails or ends it."""

import asyncio
import io
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from tests.loop_clock import settle
from tokenloom.request import errors
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.pixel_slots import PixelPart, write_all
from tokenloom.services.encoder.row_maker import KILLER_SECONDS, ImageDecoders, MakerMetrics, RowMaker
from tokenloom.services.encoder.sound_files import SoundDecoders, SoundFile
from tokenloom.services.encoder.sound_worker import SoundReply
from tokenloom.services.encoder.tower_worker import TowerJob, TowerReady, TowerReply, TowerSetup, _most
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.v1.types_pb2 import MediaItem


class Pool:
    """Answers each message with the next of its answers, of which the last stays. ``opened``: when unset, messages wait
    for it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.jobs: list[TowerJob] = []
        self.opened = asyncio.Event()
        self.opened.set()

    async def run(self, request: bytes) -> bytes:
        self.jobs.append(msgspec.msgpack.decode(request, type=TowerJob))
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        await self.opened.wait()
        if isinstance(answer, Exception):
            raise answer
        return msgspec.msgpack.encode(answer)

    async def close(self) -> None:
        """Do nothing."""


class Prepared:
    """Prepares nothing."""

    is_confined = True

    async def start(self, slots: tuple[int, ...]) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def prepare(self, file: Any, item: MediaItem, slot: int) -> list[PixelPart]:
        if file == b"bad":
            raise errors.InvalidArgument("It is damaged.")
        return []


def maker_with(
    tower: Pool, clock: Callable[[], float] = time.monotonic, *, most: int = 1, hears: bool = False
) -> RowMaker:
    registry = CollectorRegistry()
    metrics = MakerMetrics(*(Histogram(registry, name, "Any.", {}, (1.0,)) for name in ("decode", "tower")))
    settings = EncoderSettings.of(model="any", tower_batch=most)
    maker = RowMaker(str(Path("/model")), settings, metrics, Prepared(), hears=hears, clock=clock)
    maker._towers = cast(Any, tower)
    maker._take_tower(msgspec.msgpack.encode(TowerReady(width=1, most=most)))
    return maker


def item(digest: bytes) -> MediaItem:
    return MediaItem(digest=digest, num_rows=1)


def write_rows(maker: RowMaker, *values: float) -> None:
    os.ftruncate(maker._rows, 0)
    write_all(maker._rows, np.array(values, np.float32).tobytes(), 0)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (TowerReply(refused="its rows are not finite"), errors.InvalidArgument),
        (TowerReply(is_full=True), errors.ResourceExhausted),
        (errors.Unavailable("The machine is too busy"), errors.Unavailable),
    ],
)
async def test_what_the_tower_says_of_an_image(reply: Any, error: type[Exception]) -> None:
    tower = Pool(reply)
    maker = maker_with(tower)
    for _ in range(2):
        with pytest.raises(error):
            await maker.make(b"file", item(b"d"))
    assert len(tower.jobs) == 2
    await maker.close()


async def test_a_header_that_takes_too_long_is_the_files_fault() -> None:
    decoders = ImageDecoders("/model", EncoderSettings.of(model="any"))
    chunk = struct.pack(">I", 0) + b"vpAg" + struct.pack(">I", zlib.crc32(b"vpAg"))
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    data = image.getvalue()
    try:
        assert (await decoders.size(data)).width == 8
        with pytest.raises(errors.InvalidArgument, match="takes too long"):
            await decoders.size(data[:33] + chunk * (19 * 2**20 // len(chunk)) + data[33:])
        assert (await decoders.size(data)).width == 8, "others are read by the next process"
    finally:
        await decoders.close()


async def test_a_file_that_ended_the_tower_is_not_tried_again_at_once() -> None:
    now = 100.0
    tower = Pool(errors.Internal("3 processes ended"), TowerReply([1]))
    maker = maker_with(tower, lambda: now)
    write_rows(maker, 0.5)
    with pytest.raises(errors.Internal):
        await maker.make(b"file", item(b"d"))
    now += KILLER_SECONDS - 1
    with pytest.raises(errors.Internal, match="tried again in 1 s"):
        await maker.make(b"file", item(b"d"))
    assert (await maker.make(b"other", item(b"e"))).num_rows == 1
    assert len(tower.jobs) == 2
    now += 1
    assert (await maker.make(b"file", item(b"d"))).num_rows == 1
    await maker.close()


@pytest.mark.parametrize("hears", [False, True])
async def test_what_waits_is_computed_together(*, hears: bool) -> None:
    tower = Pool(TowerReply([1, 1, 1]), TowerReply([1]))
    maker = maker_with(tower, most=3, hears=hears)
    tower.opened.clear()
    write_rows(maker, 1.0, 2.0, 3.0)
    calls = [asyncio.create_task(maker.make(b"file", item(b"%d" % number))) for number in range(4)]
    await settle()
    tower.opened.set()
    rows = await asyncio.gather(*calls)
    assert [np.frombuffer(each.data, np.float32).tolist() for each in rows] == [[1.0], [2.0], [3.0], [1.0]]
    assert [len(job.inputs) for job in tower.jobs] == [3, 1]
    await maker.close()


@pytest.mark.parametrize(("setup", "most"), [({}, 1), ({"batch": 4}, 4), ({"hears": True}, 8)])
def test_how_many_a_gpu_computes_at_once(setup: dict[str, Any], most: int) -> None:
    class OnGpu:
        device = "cuda:0"

    assert _most(OnGpu(), TowerSetup("", "auto", "auto", 0, 0, **setup)) == most


async def test_a_piece_that_fails_does_not_fail_the_others() -> None:
    bad = TowerReply(refused="not finite")
    tower = Pool(bad, bad, TowerReply([1]))
    maker = maker_with(tower, most=2, hears=True)
    tower.opened.clear()
    write_rows(maker, 1.0)
    calls = [asyncio.create_task(maker.make(b"file", item(b"%d" % number))) for number in range(3)]
    await settle()
    tower.opened.set()
    first, second, third = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, errors.InvalidArgument)
    assert not isinstance(second, BaseException)
    assert not isinstance(third, BaseException)
    assert [len(job.inputs) for job in tower.jobs] == [2, 1, 1, 1]
    await maker.close()


async def test_a_call_that_is_cancelled_does_not_end_the_tower() -> None:
    tower = Pool(TowerReply([1]))
    maker = maker_with(tower)
    free = len(maker._slots._free)
    tower.opened.clear()
    write_rows(maker, 1.0)
    calls = [asyncio.create_task(maker.make(b"file", item(b"%d" % number))) for number in range(3)]
    await settle()
    calls[0].cancel()
    calls[1].cancel()
    await settle()
    assert len(maker._slots._free) == free - 2, "the tower still reads the first one's slot"
    tower.opened.set()
    assert (await calls[2]).num_rows == 1
    assert len(tower.jobs) == 2
    await settle()
    assert len(maker._slots._free) == free
    await maker.close()


async def test_a_file_that_is_not_prepared_gives_its_slot_back() -> None:
    maker = maker_with(Pool(TowerReply([1])))
    for _ in range(10):
        with pytest.raises(errors.InvalidArgument):
            await maker.make(b"bad", item(b"d"))
    await maker.close()


@pytest.mark.parametrize(
    "error", [errors.DeadlineExceeded("too much time"), errors.ResourceExhausted("too much memory", retry_after=None)]
)
async def test_an_image_that_takes_too_much_is_refused(error: errors.TokenloomError) -> None:
    class Decoders:
        async def run(self, request: bytes) -> bytes:
            raise error

    images = ImageDecoders("/model", EncoderSettings.of(model="any"))
    images._decoders = cast(Any, Decoders())
    with pytest.raises(errors.InvalidArgument, match=error.message):
        await images.prepare(b"image", MediaItem(), 0)


@pytest.mark.parametrize(
    "error", [errors.DeadlineExceeded("too much time"), errors.ResourceExhausted("too much memory", retry_after=None)]
)
async def test_a_sound_that_takes_too_much_is_refused(error: errors.TokenloomError) -> None:
    class Readers:
        async def run(self, request: bytes, files: object) -> bytes:
            raise error

    seconds = Histogram(CollectorRegistry(), "decode", "Seconds.", {}, (1.0,))
    sounds = SoundDecoders("/model", EncoderSettings.of(model="any"), seconds)
    sounds._readers = cast(Any, Readers())
    with pytest.raises(errors.InvalidArgument, match=r"to decode the sound|too much memory"):
        await sounds.read(SoundFile(""), SoundFile(""))


async def test_a_disk_without_room_for_samples_is_no_fault_of_the_sound() -> None:
    class Readers:
        async def run(self, request: bytes, files: object) -> bytes:
            return msgspec.msgpack.encode(SoundReply(is_full=True))

    seconds = Histogram(CollectorRegistry(), "decode", "Seconds.", {}, (1.0,))
    sounds = SoundDecoders("/model", EncoderSettings.of(model="any"), seconds)
    sounds._readers = cast(Any, Readers())
    with pytest.raises(errors.ResourceExhausted, match="disk takes no sound"):
        await sounds.read(SoundFile(""), SoundFile(""))

"""A file that ends the tower is not tried for ever."""

import io
import struct
import zlib
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from PIL import Image
from prometheus_client import CollectorRegistry

from tokenloom.request import errors
from tokenloom.services.encoder.decode_worker import DecodeReply
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.row_maker import MakerMetrics, RowMaker
from tokenloom.services.encoder.tower_worker import TowerReply
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.v1.types_pb2 import MediaItem


class Pool:
    """Answers each message with the next of its answers, of which the last stays."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.num_messages = 0

    async def run(self, request: bytes) -> bytes:
        self.num_messages += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return msgspec.msgpack.encode(answer)

    async def close(self) -> None:
        """Do nothing."""


def maker_with(tower: Pool) -> RowMaker:
    registry = CollectorRegistry()
    metrics = MakerMetrics(*(Histogram(registry, name, "Any.", {}, (1.0,)) for name in ("decode", "tower")))
    maker = RowMaker(str(Path("/model")), EncoderSettings.of(model="any"), metrics)
    maker._decoders, maker._towers = cast(Any, Pool(DecodeReply())), cast(Any, tower)
    return maker


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
            await maker.make(b"file", MediaItem(digest=b"d", num_rows=4))
    assert tower.num_messages == 2
    await maker.close()


async def test_a_header_that_takes_too_long_is_the_files_fault() -> None:
    maker = maker_with(Pool(TowerReply()))
    chunk = struct.pack(">I", 0) + b"vpAg" + struct.pack(">I", zlib.crc32(b"vpAg"))
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    data = image.getvalue()
    try:
        assert (await maker.size(data)).width == 8
        with pytest.raises(errors.InvalidArgument, match="takes too long"):
            await maker.size(data[:33] + chunk * (19 * 2**20 // len(chunk)) + data[33:])
        assert (await maker.size(data)).width == 8, "others are read by the next process"
    finally:
        await maker.close()


async def test_a_file_that_ended_the_tower_is_not_tried_again() -> None:
    tower = Pool(errors.Internal("3 processes ended"), TowerReply())
    maker = maker_with(tower)
    item = MediaItem(digest=b"d", num_rows=4)
    with pytest.raises(errors.Internal):
        await maker.make(b"file", item)
    with pytest.raises(errors.InvalidArgument, match="not tried again"):
        await maker.make(b"file", item)
    assert (await maker.make(b"other", MediaItem(digest=b"e", num_rows=4))).num_rows == 0
    assert tower.num_messages == 2
    await maker.close()

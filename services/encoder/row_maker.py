"""Makes rows: a file becomes pixels in one process and rows in another."""

import asyncio
import os
import time
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.v1.encoder_pb2 import PutResponse, RowType
from tokenloom.v1.types_pb2 import MediaItem

from .decode_worker import DecodeJob, DecodeReply, DecodeSetup
from .encoder_settings import EncoderSettings
from .pixel_slots import PixelPart, PixelSlots, new_memory, read_all
from .tower_worker import TowerJob, TowerReady, TowerReply, TowerSetup

DECODE_MEMORY_BYTES = 2 << 30
"""Of one image: 64 megapixels take 0.2 GB as they are decoded, and some processors enlarge what they get."""
HEADER_SECONDS = 1.0
"""Of processor time for a header. One process reads all of them, and 20 MB of empty chunks before the pixels, which
cost a stranger nothing, kept it busy for 5 to 8 s."""
START_SECONDS = 300.0
"""Decoders yield to all other work: beside thirty busy processes on two cores one took more than a minute to start."""
TOWER_START_SECONDS = 1800.0
"""Reading the largest towers from a slow disk."""
WAIT_SECONDS = 60.0
"""As long as one image may take to be decoded, on a busy machine."""


MAX_KILLERS = 1024
"""Files that have ended the tower, by digest."""


class Rows(NamedTuple):
    """Holds the rows of an item.

    Attributes:
        data: [num_rows, width] numbers, row by row, little-endian.
    """

    data: bytes
    num_rows: int
    width: int
    type: RowType


@dataclass(frozen=True, slots=True)
class MakerMetrics:
    """Measures each image."""

    decode: Histogram
    tower: Histogram


class RowMaker:
    """Owns the processes that decode, and the one that computes the tower.

    Attributes:
        width: Numbers in a row.
        row_type: How they are written.
        is_confined: Whether the processes that decode have no network.
    """

    def __init__(self, path: str, settings: EncoderSettings, metrics: MakerMetrics) -> None:
        """``path``: the checkpoint's directory."""
        self._settings, self._metrics = settings, metrics
        self._path = path
        self.num_places = settings.image_workers + 1  # one is prepared for the tower while all others are decoded
        self._slots = PixelSlots(self.num_places)
        self._rows = new_memory()
        self._tower_free = asyncio.Lock()
        self._headers = HelperPool(self._start_headers, 1, "read the image's header", WAIT_SECONDS)
        self._decoders = HelperPool(self._start_decoder, settings.image_workers, "decode the image", WAIT_SECONDS)
        self._towers = HelperPool(self._start_tower, 1, "encode the image", settings.tower_timeout)
        self.width = 0
        self.row_type = RowType.ROW_TYPE_FLOAT32
        self.is_confined = True
        self._killers: dict[bytes, None] = {}  # the latest last

    async def start(self) -> None:
        """Load the tower. Raises ``InvalidArgument`` for a checkpoint whose images cannot be read, ``Unavailable`` if a
        process does not start."""
        try:
            async with asyncio.TaskGroup() as starting:
                for pool in (self._headers, self._decoders, self._towers):
                    starting.create_task(pool.start(), name="encoder-process")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def close(self) -> None:
        """End the processes."""
        for pool in (self._headers, self._decoders, self._towers):
            await pool.close()
        self._slots.close()
        os.close(self._rows)

    async def size(self, data: bytes) -> PutResponse:
        """Return the size of an image, read from its header. Raises ``InvalidArgument`` for a file that is refused, and
        as :meth:`.HelperPool.run`."""
        try:
            reply = _decoded(await self._headers.run(msgspec.msgpack.encode(DecodeJob(data))))
        except errors.DeadlineExceeded:  # its own doing, so that no client should send it again
            raise errors.InvalidArgument("The image's header takes too long to read.", "messages") from None
        return PutResponse(width=reply.width, height=reply.height, num_bytes=len(data))

    async def make(self, data: bytes, item: MediaItem) -> Rows:
        """Return the rows of an item from its file. Not more than ``num_places`` calls at a time.

        Raises ``InvalidArgument`` for a file that cannot be computed, ``ResourceExhausted`` when the device has no room
        for it, and as :meth:`.HelperPool.run`.
        """
        if item.digest in self._killers:
            raise errors.InvalidArgument(
                "The encoder ends when it computes this image; it is not tried again.", "messages"
            )
        with self._slots.taken() as slot:
            job = DecodeJob(data, slot, item.options_json, item.num_in_prompt or 1)
            began = time.monotonic()
            reply = _decoded(await self._decoders.run(msgspec.msgpack.encode(job)))
            self._metrics.decode.observe(time.monotonic() - began)
            async with self._tower_free:
                began = time.monotonic()
                try:
                    rows = await self._compute(slot, reply.parts)
                except errors.Internal:
                    self._note_killer(item.digest)
                    raise
                self._metrics.tower.observe(time.monotonic() - began)
        return rows

    async def _compute(self, slot: int, parts: list[PixelPart]) -> Rows:
        answer = await self._towers.run(msgspec.msgpack.encode(TowerJob(slot, parts)))
        reply = msgspec.msgpack.decode(answer, type=TowerReply)
        if reply.is_full:
            raise errors.ResourceExhausted("The encoder has no memory for the image now; retry.", retry_after=1.0)
        if reply.refused:
            raise errors.InvalidArgument(f"The model cannot encode the image: {reply.refused}.", "messages")
        size = reply.num_rows * self.width * (2 if self.row_type == RowType.ROW_TYPE_BFLOAT16 else 4)
        data = await asyncio.to_thread(read_all, self._rows, size, 0)
        return Rows(bytes(data), reply.num_rows, self.width, self.row_type)

    def _note_killer(self, digest: bytes) -> None:
        # The tower may take minutes to load, and no rows are computed meanwhile: a file that has ended it several times
        # does not do so again.
        self._killers[digest] = None
        if len(self._killers) > MAX_KILLERS:
            del self._killers[next(iter(self._killers))]

    async def _start_headers(self) -> HelperProcess:
        return await self._start_decoding("", HEADER_SECONDS)

    async def _start_decoder(self) -> HelperProcess:
        return await self._start_decoding(self._path, self._settings.image_timeout)

    async def _start_decoding(self, path: str, seconds: float) -> HelperProcess:
        settings = self._settings
        setup = DecodeSetup(path, DECODE_MEMORY_BYTES, seconds, WAIT_SECONDS, settings.max_image_pixels)
        packed, slots = msgspec.msgpack.encode(setup), self._slots.descriptors if path else ()
        return await start_helper(f"{__package__}.decode_worker", packed, self._take_decoder, START_SECONDS, slots)

    def _take_decoder(self, data: bytes) -> None:
        self.is_confined = _decoded(data, "model").is_confined and self.is_confined

    async def _start_tower(self) -> HelperProcess:
        settings = self._settings
        setup = TowerSetup(self._path, settings.dtype, settings.device, settings.tower_threads, self._rows)
        packed, passed = msgspec.msgpack.encode(setup), (*self._slots.descriptors, self._rows)
        return await start_helper(f"{__package__}.tower_worker", packed, self._take_tower, TOWER_START_SECONDS, passed)

    def _take_tower(self, data: bytes) -> None:
        ready = msgspec.msgpack.decode(data, type=TowerReady)
        if ready.refused:
            raise errors.InvalidArgument(ready.refused, "model")
        self.width = ready.width
        self.row_type = RowType.ROW_TYPE_BFLOAT16 if ready.is_bfloat16 else RowType.ROW_TYPE_FLOAT32


def _decoded(data: bytes, field: str = "messages") -> DecodeReply:
    reply = msgspec.msgpack.decode(data, type=DecodeReply)
    if reply.refused:
        raise errors.InvalidArgument(reply.refused, field)
    return reply

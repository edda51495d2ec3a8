"""An encoder without processes: what it computes is the file's length."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from typing import Any, cast

import numpy as np
from prometheus_client import CollectorRegistry

from tokenloom.request import errors
from tokenloom.services.encoder.encoder_servicer import EncoderMetrics, EncoderServicer
from tokenloom.services.encoder.media_fetcher import MediaFetcher
from tokenloom.services.encoder.media_store import MediaStore
from tokenloom.services.encoder.pixel_slots import read_all
from tokenloom.services.encoder.row_cache import RowCache
from tokenloom.services.encoder.row_maker import Rows
from tokenloom.services.encoder.sound_files import SoundFile, SoundFiles, SoundLimits
from tokenloom.v1.encoder_pb2 import GetEncoderInfoResponse, PutHeader, PutRequest, PutResponse, RowType
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE, MediaItem, MediaKind

WIDTH = 8


class FakeMaker:
    """Makes four rows of each file. ``opened``: when unset, computations wait for it."""

    num_places = 2

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.num_made = self.num_running = self.most_running = 0

    async def size(self, data: bytes, kind: MediaKind = MEDIA_KIND_IMAGE) -> PutResponse:
        if data.startswith(b"bad"):
            raise errors.InvalidArgument("The image is not a PNG, JPEG, WebP or GIF.", "messages")
        return PutResponse(width=len(data), height=1, num_bytes=len(data))

    async def make(self, file: Any, item: MediaItem) -> Rows:
        self.num_made += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.opened.wait()
        finally:
            self.num_running -= 1
        rows = np.full((4, WIDTH), len(file), np.float32)
        return Rows(rows.tobytes(), 4, WIDTH, RowType.ROW_TYPE_FLOAT32)


class FakeReader:
    """Makes of each byte of a sound a sample. ``opened``: when unset, sounds wait for it, with as many samples as they
    have so far written."""

    rate = 16_000

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.num_read = self.num_running = 0

    async def read(self, source: SoundFile, target: SoundFile) -> None:
        self.num_read += 1
        self.num_running += 1
        data = read_all(source.descriptor, source.num_bytes, 0)
        try:
            if data.startswith(b"bad"):
                raise errors.InvalidArgument("The file has no sound.", "messages")
            target.write(np.frombuffer(data, np.uint8).astype(np.float32).tobytes(), 0)
            await self.opened.wait()
        finally:
            self.num_running -= 1
        target.num_samples, target.peak = len(data), 1.0


class FakeEncoder:
    """Holds a servicer and what it stands on. ``now``: seconds of its clock."""

    def __init__(
        self, *, files_bytes: int = 1 << 20, rows_bytes: int = 1 << 20, fetcher: Any = None, hears: bool = False
    ) -> None:
        self.now = 0.0
        self.maker = FakeMaker()
        self.reader = FakeReader()
        self.files = MediaStore[Any](files_bytes, 100.0, lambda: self.now)
        self.cache = RowCache(rows_bytes)
        self.kind = MEDIA_KIND_AUDIO if hears else MEDIA_KIND_IMAGE
        info = GetEncoderInfoResponse(media_kinds=[self.kind], max_file_bytes=1 << 16)
        self.metrics = EncoderMetrics(CollectorRegistry(), self.files, self.cache)
        sounds = SoundFiles(self.files, self.reader, SoundLimits(1 << 16, 2, "", 0), self.metrics.sound_seconds)
        reader = sounds if hears else self.maker
        self.servicer = EncoderServicer(
            self.files, self.cache, self.maker, info, self.metrics, reader, cast(MediaFetcher | None, fetcher)
        )

    async def put(self, data: bytes, *, pieces: int = 2, **header: Any) -> PutResponse:
        values = {"kind": self.kind, "digest": digest_of(data), "num_bytes": len(data), "tenant": "t"} | header

        async def messages() -> AsyncIterator[PutRequest]:
            yield PutRequest(header=PutHeader(**values))
            step = max(1, -(-len(data) // pieces))
            for first in range(0, len(data), step):
                yield PutRequest(data=data[first : first + step])

        return await self.servicer.Put(messages(), cast(Any, None))


def digest_of(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def item_of(data: bytes, num_rows: int = 4) -> MediaItem:
    return MediaItem(key=b"key" + data, num_rows=num_rows, levels=1, digest=digest_of(data))

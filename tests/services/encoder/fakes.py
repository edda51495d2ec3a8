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
from tokenloom.services.encoder.row_cache import RowCache
from tokenloom.services.encoder.row_maker import Rows
from tokenloom.v1.encoder_pb2 import GetEncoderInfoResponse, PutHeader, PutRequest, PutResponse, RowType
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem

WIDTH = 8


class FakeMaker:
    """Makes four rows of each file. ``opened``: when unset, computations wait for it."""

    num_places = 2

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.opened.set()
        self.num_made = self.num_running = self.most_running = 0

    async def size(self, data: bytes) -> PutResponse:
        if data.startswith(b"bad"):
            raise errors.InvalidArgument("The image is not a PNG, JPEG, WebP or GIF.", "messages")
        return PutResponse(width=len(data), height=1, num_bytes=len(data))

    async def make(self, data: bytes, item: MediaItem) -> Rows:
        self.num_made += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.opened.wait()
        finally:
            self.num_running -= 1
        rows = np.full((4, WIDTH), len(data), np.float32)
        return Rows(rows.tobytes(), 4, WIDTH, RowType.ROW_TYPE_FLOAT32)


class FakeEncoder:
    """Holds a servicer and what it stands on. ``now``: seconds of its clock."""

    def __init__(self, *, files_bytes: int = 1 << 20, rows_bytes: int = 1 << 20, fetcher: Any = None) -> None:
        self.now = 0.0
        self.maker = FakeMaker()
        self.files = MediaStore(files_bytes, 100.0, lambda: self.now)
        self.cache = RowCache(rows_bytes)
        info = GetEncoderInfoResponse(media_kinds=[MEDIA_KIND_IMAGE], max_file_bytes=1 << 16)
        metrics = EncoderMetrics(CollectorRegistry(), self.files, self.cache)
        self.servicer = EncoderServicer(
            self.files, self.cache, self.maker, info, metrics, cast(MediaFetcher | None, fetcher)
        )

    async def put(self, data: bytes, *, pieces: int = 2, **header: Any) -> PutResponse:
        values = {"kind": MEDIA_KIND_IMAGE, "digest": digest_of(data), "num_bytes": len(data), "tenant": "t"} | header

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

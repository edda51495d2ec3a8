"""Serves ``Encoder``: keeps the files of requests, and answers with rows."""

import asyncio
import contextlib
import hashlib
import math
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import grpc.aio
from prometheus_client import CollectorRegistry, Gauge

from tokenloom.request import errors
from tokenloom.services.runtime.fair_stage import BilledStage, FairStage
from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram
from tokenloom.services.runtime.telemetry.process_metrics import LATENCY_SECONDS
from tokenloom.v1.encoder_pb2 import (
    GetEncoderInfoRequest,
    GetEncoderInfoResponse,
    GetRequest,
    HasRequest,
    HasResponse,
    PutHeader,
    PutRequest,
    PutResponse,
    ReleaseFilesRequest,
    ReleaseFilesResponse,
    ResetCachesRequest,
    ResetCachesResponse,
    RowChunk,
)
from tokenloom.v1.encoder_pb2_grpc import EncoderServicer as EncoderServicerBase
from tokenloom.v1.types_pb2 import MediaItem, MediaKind

from .media_fetcher import MediaFetcher
from .media_store import FileOwner, MediaStore, Pin
from .row_cache import RowCache
from .row_maker import Rows
from .sound_files import SoundFiles

if TYPE_CHECKING:
    from tokenloom.process.cpu_bill import CpuBill

_Context = grpc.aio.ServicerContext[Any, Any]

MESSAGE_SECONDS = 60.0
"""Between two messages of a ``Put``."""
LOOK_SECONDS = 1.0
"""How often an encoder that drains looks for leases that have ended."""
CHUNK_BYTES = 1 << 20
"""Of rows in a message: 9.8 MB take 9 ms of both ends so, 16 in pieces of 256 KiB, 15 of 4 MiB and 39 of 16 MiB."""
MAX_WAITING = 1024
"""Files whose headers, and items whose rows, wait."""
MAX_FETCHES = 16
MAX_WAITING_ROWS = 1 << 22
"""Of all items that are computed and wait."""
_LONG_BYTES = 64 << 10
"""A digest of more is computed in a thread: 1 ms for 2 MB."""
_DIGEST_BYTES = 32


class Maker(Protocol):
    """Computes what the servicer does not; see :class:`.RowMaker`."""

    num_places: int

    async def make(self, file: Any, item: MediaItem) -> Rows:
        """Return the rows of an item."""


class SizeReader(Protocol):
    """Reads sizes of images and videos; see :class:`.ImageDecoders`."""

    async def size(self, data: bytes, kind: MediaKind) -> PutResponse:
        """Return the size of an image or a video."""


class EncoderMetrics:
    """Counts what the encoder does and holds."""

    def __init__(self, registry: CollectorRegistry, files: MediaStore[Any], cache: RowCache) -> None:
        name = "tokenloom_encoder_"
        self.put_bytes = Counter(registry, name + "put_bytes", "Bytes of the files that were put.", {})
        self.rows = Counter(registry, name + "rows", "Rows that were computed.", {})
        for outcome, text, read in (
            ("computed", "whose rows were computed.", lambda: cache.num_computed),
            ("found", "whose rows were kept.", lambda: cache.num_found),
            ("joined", "whose rows another call was computing.", lambda: cache.num_joined),
        ):
            Counter(registry, f"{name}items_{outcome}", f"Items that engines asked for {text}", {}, read)
        for what, text, read in (
            ("file_bytes", "Bytes of the files that are kept.", lambda: files.num_bytes),
            ("pinned_file_bytes", "Bytes of the files of live requests.", lambda: files.num_pinned_bytes),
            ("row_bytes", "Bytes of the rows that are kept.", lambda: cache.num_bytes),
        ):
            Gauge(name + what, text, registry=registry).set_function(read)
        self.sound_seconds = Counter(registry, name + "sound_seconds", "Seconds of the sounds that were decoded.", {})
        self.decode, self.tower, self.read = (
            Histogram(registry, f"{name}{step}_seconds", f"Seconds that {text} took.", {}, LATENCY_SECONDS)
            for step, text in (
                ("decode", "decoding an image or a video and preparing its pixels, or preparing a piece of a sound,"),
                ("tower", "the tower of an image, a video or a piece of a sound"),
                ("sound_decode", "decoding a whole sound"),
            )
        )


class EncoderServicer(EncoderServicerBase):
    """Answers gateways and engines.

    Attributes:
        num_calls: Calls of ``Get`` that are answered now.
        num_waiting: Items that wait for their turns.
        changed: Set when a request was released or a call has ended.
    """

    def __init__(
        self, files: MediaStore[Any], cache: RowCache, maker: Maker, info: GetEncoderInfoResponse,
        metrics: EncoderMetrics, reader: SizeReader | SoundFiles, fetcher: MediaFetcher | None = None,
        bill: "CpuBill | None" = None,
    ) -> None:  # fmt: skip
        """``info``: what the encoder says of itself. ``reader``: takes sounds, or reads sizes of images, as the model
        reads them. ``fetcher``: None: no URL is fetched. ``bill``: shares CPU time out by the rows that are computed;
        None without ``--bill``."""
        self._files, self._cache, self._maker, self._metrics = files, cache, maker, metrics
        self._info = info
        self._reader, self._fetcher = reader, fetcher
        # Two stages: counting the frames of a video takes seconds, and reading the header of an image a millisecond.
        self._headers, self._video_headers = (
            FairStage(1, what, max_waiting=MAX_WAITING, max_cost=MAX_WAITING * size)
            for what, size in (("images", info.max_file_bytes), ("videos", info.max_video_bytes))
        )
        self._fetches = FairStage(MAX_FETCHES, "files to fetch", max_waiting=MAX_WAITING, max_cost=MAX_WAITING)
        stage = FairStage if bill is None else partial(BilledStage, bill, 0)
        self._turns = stage(
            maker.num_places, "images or sounds", max_waiting=MAX_WAITING, max_cost=MAX_WAITING_ROWS, leaves_spare=True
        )
        self.num_calls = 0
        self.changed = asyncio.Event()

    @property
    def num_waiting(self) -> int:
        return self._turns.num_waiting

    async def Put(self, requests: AsyncIterator[PutRequest], context: _Context) -> PutResponse:
        messages = _timed(aiter(requests))
        header = (await _next(messages)).header
        self._check(header)
        if isinstance(self._reader, SoundFiles):
            parts = _whole(await self._fetched(header)) if header.url else _parts(messages)
            facts = await self._reader.put(header, parts)
            self._metrics.put_bytes.inc(facts.num_bytes)
            return facts
        if header.url:
            with self._files.arriving(header.tenant, self._most(header.kind)):
                return await self._keep(header, await self._fetched(header))
        with self._files.arriving(header.tenant, header.num_bytes):
            return await self._keep(header, await _received(messages, header.num_bytes))

    async def Has(self, request: HasRequest, context: _Context) -> HasResponse:
        owner = FileOwner(request.tenant, request.cache_salt)
        names = [_file_name(digest, request.kind) for digest in request.digest]
        facts = [self._files.find(owner, name, request.request_id) for name in names]
        return HasResponse(has=[each is not None for each in facts], facts=[each or PutResponse() for each in facts])

    async def Get(self, request: GetRequest, context: _Context) -> AsyncIterator[RowChunk]:
        item = request.item
        if not (item.key and item.num_rows):
            raise errors.InvalidArgument("an item needs a key and a number of rows", "item")
        self.num_calls += 1
        try:
            rows = await self._rows(request)
            if rows.num_rows != item.num_rows:
                what = _NOUNS.get(item.kind, "image")
                raise errors.InvalidArgument(
                    f"The {what} has {rows.num_rows} rows, and {item.num_rows} tokens stand for it.", "messages"
                )
            size = len(rows.data) // rows.num_rows
            step, data = max(1, CHUNK_BYTES // size), memoryview(rows.data)
            for first in range(request.first_row, rows.num_rows, step):
                end = min(first + step, rows.num_rows)
                part = bytes(data[first * size : end * size])
                yield RowChunk(first_row=first, num_rows=end - first, width=rows.width, rows=part, type=rows.type)
        finally:
            self.num_calls -= 1
            self.changed.set()

    async def ReleaseFiles(self, request: ReleaseFilesRequest, context: _Context) -> ReleaseFilesResponse:
        self._files.release(Pin(request.tenant, request.request_id))
        self.changed.set()
        return ReleaseFilesResponse()

    async def ResetCaches(self, request: ResetCachesRequest, context: _Context) -> ResetCachesResponse:
        self._cache.clear()
        if request.files:
            self._files.forget_unused()
        return ResetCachesResponse()

    async def GetEncoderInfo(self, request: GetEncoderInfoRequest, context: _Context) -> GetEncoderInfoResponse:
        self._info.encoded = self._cache.num_computed
        return self._info

    async def until_unused(self) -> None:
        """Return when no call is answered and no request needs a file that is here."""
        while self.num_calls or self._files.num_pinned_bytes:
            self.changed.clear()
            # A lease ends without a call: that of a request whose gateway has died is released by nothing else.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self.changed.wait()
            self._files.expire()

    def _check(self, header: PutHeader) -> None:
        if header.kind not in self._info.media_kinds:
            kind = MediaKind.Name(header.kind).removeprefix("MEDIA_KIND_").lower()
            raise errors.InvalidArgument(f"This model reads no files of the kind {kind}.", "kind")
        if header.url:
            return
        is_open = header.kind == MediaKind.MEDIA_KIND_AUDIO  # what a client still sends has neither length nor digest
        if len(header.digest) != _DIGEST_BYTES and not (is_open and not header.digest):
            raise errors.InvalidArgument("digest must be a SHA-256, of 32 bytes", "digest")
        if not header.num_bytes and not is_open:
            raise errors.InvalidArgument("The file is empty.", "messages")
        if header.num_bytes > (most := self._most(header.kind)):
            raise errors.PayloadTooLarge(
                f"The file has {header.num_bytes:,} bytes; at most {most:,} are taken.", "messages"
            )

    def _most(self, kind: MediaKind) -> int:
        """Return the bytes of the largest file of a kind."""
        info = self._info
        return info.max_video_bytes if kind == MediaKind.MEDIA_KIND_VIDEO else info.max_file_bytes

    async def _fetched(self, header: PutHeader) -> bytes:
        """Return the file of a URL."""
        if self._fetcher is None:
            raise errors.PermissionDenied(
                "Files are not fetched from URLs here (--allowed-media-domains); send the file itself in the request.",
                "url",
            )
        await self._fetches.begin(header.tenant, 1)
        try:
            most = self._info.max_video_bytes if header.kind == MediaKind.MEDIA_KIND_VIDEO else None
            return await self._fetcher.fetch(header.url, most)
        finally:
            self._fetches.end(header.tenant, 1)

    async def _keep(self, header: PutHeader, data: bytes) -> PutResponse:
        """Keep an image or a video that has arrived, and return what it is."""
        assert not isinstance(self._reader, SoundFiles)
        hashed = await asyncio.to_thread(_digest, data) if len(data) > _LONG_BYTES else _digest(data)
        if header.digest and hashed != header.digest:
            raise errors.InvalidArgument("The file's bytes are not those of its digest.", "digest")
        self._metrics.put_bytes.inc(len(data))
        owner, name = FileOwner(header.tenant, header.cache_salt), _file_name(hashed, header.kind)
        if (facts := self._files.add_owner(owner, name, header.request_id)) is not None:
            return facts
        headers = self._video_headers if header.kind == MediaKind.MEDIA_KIND_VIDEO else self._headers
        await headers.begin(header.tenant, len(data))
        try:
            facts = await self._reader.size(data, header.kind)
        finally:
            headers.end(header.tenant, len(data))
        facts.digest = hashed
        self._files.put(owner, data, facts, header.request_id, name)
        return facts

    async def _rows(self, request: GetRequest) -> Rows:
        seconds = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else math.inf
        try:
            async with asyncio.timeout(seconds if seconds < math.inf else None):
                make = partial(self._make, request.item, request.tenant)
                return await self._cache.get(request.item.key, make)
        except TimeoutError:
            raise errors.DeadlineExceeded("The file was not encoded in time.") from None

    async def _make(self, item: MediaItem, tenant: str) -> Rows:
        await self._turns.begin(tenant, item.num_rows)
        try:
            if (data := self._files.data(_file_name(item.digest, item.kind))) is None:
                raise errors.NotFound(f"File {item.index + 1} of the prompt is not here any more; put it again.")
            rows = await self._maker.make(data, item)
        finally:
            self._turns.end(tenant, item.num_rows)
        self._metrics.rows.inc(rows.num_rows)
        return rows


_NOUNS = {MediaKind.MEDIA_KIND_AUDIO: "sound", MediaKind.MEDIA_KIND_VIDEO: "video"}


def _file_name(digest: bytes, kind: MediaKind) -> bytes:
    """Return by what a file is found: a picture may be an image, and a video of one frame, and is two files then."""
    return digest + b"video" if kind == MediaKind.MEDIA_KIND_VIDEO else digest


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


async def _timed(messages: AsyncIterator[PutRequest]) -> AsyncIterator[PutRequest]:
    """Yield messages, until one does not come in time."""
    while True:
        try:
            async with asyncio.timeout(MESSAGE_SECONDS):
                message = await anext(messages)
        except StopAsyncIteration:
            return
        except TimeoutError:
            raise errors.DeadlineExceeded(f"no part of the file arrived within {MESSAGE_SECONDS:g} s") from None
        yield message


async def _next(messages: AsyncIterator[PutRequest]) -> PutRequest:
    try:
        return await anext(messages)
    except StopAsyncIteration:
        raise errors.InvalidArgument("the call ends before the file does", "data") from None


async def _received(messages: AsyncIterator[PutRequest], num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        piece = (await _next(messages)).data
        if not piece or len(data) + len(piece) > num_bytes:
            raise errors.InvalidArgument(f"the file does not have the {num_bytes} bytes of its header", "data")
        data += piece
    return bytes(data)


async def _parts(messages: AsyncIterator[PutRequest]) -> AsyncIterator[bytes]:
    async for message in messages:
        if not message.data:
            raise errors.InvalidArgument("a message holds no part of the file", "data")
        yield message.data


async def _whole(data: bytes) -> AsyncIterator[bytes]:
    yield data

"""An encoder whose files say how many rows they have, and whose rows follow from the keys of items."""

import asyncio
import hashlib
from typing import Any

from tests.engine_core.media import PLACEHOLDER, rows_of
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, RowsKey
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import HIDDEN_SIZE
from tokenloom.services.encoder.encoder_servicer import EncoderMetrics, EncoderServicer, Maker, SizeReader
from tokenloom.services.encoder.encoder_settings import EncoderSettings
from tokenloom.services.encoder.media_store import MediaStore
from tokenloom.services.encoder.row_cache import RowCache
from tokenloom.services.encoder.row_maker import Rows
from tokenloom.services.encoder.service import EncoderService
from tokenloom.services.runtime.host.host import Host
from tokenloom.v1 import types_pb2
from tokenloom.v1.encoder_pb2 import ROW_TYPE_FLOAT32, GetEncoderInfoResponse, PutResponse
from tokenloom.v1.encoder_pb2_grpc import add_EncoderServicer_to_server
from tokenloom.v1.tokenizer_pb2 import MediaSize
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem, MediaKind, MediaRun

MARK = 1
"""Stands for an image in the tokens of a conversation; no prompt has this id otherwise."""
HEADER_SECONDS = 0.002
TOWER_SECONDS = 0.08


def file_of(number: int, num_rows: int) -> bytes:
    """Return a file with so many rows."""
    return f"image {number} of {num_rows}".encode()


def rows_in(file: bytes) -> int:
    return int(file.rpartition(b" ")[2])


def key_of(digest: bytes, num_rows: int) -> bytes:
    return hashlib.sha256(digest + bytes([num_rows])).digest()


def with_rows(prompt: tuple[int, ...], files: tuple[bytes, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of a prompt whose marks are expanded, and the same with what stands for rows in a hash."""
    tokens, hashed, left = list[int](), list[int](), list(files)
    for each in prompt:
        if each != MARK:
            tokens.append(each)
            hashed.append(each)
            continue
        file = left.pop(0)
        num_rows = rows_in(file)
        tokens += [PLACEHOLDER] * num_rows
        key = RowsKey(key_of(hashlib.sha256(file).digest(), num_rows), num_rows, 1)
        hashed += embeds_ids(EmbedsSpan(0, rows_of(key)))
    assert not left, "a mark for each file"
    return tuple(tokens), tuple(hashed)


def expand(token_ids: list[int], media: list[MediaSize]) -> tuple[list[int], list[MediaItem]]:
    """Return a conversation's tokens with those of its images, and where they are; as a tokenizer does."""
    tokens, items = list[int](), list[MediaItem]()
    for each in token_ids:
        if each != MARK:
            tokens.append(each)
            continue
        size = media[len(items)]
        run = MediaRun(position=len(tokens), num_tokens=size.width)
        key = key_of(size.digest, size.width)
        items.append(
            MediaItem(
                key=key, kind=MEDIA_KIND_IMAGE, num_rows=size.width, levels=1, runs=[run], encoder=size.encoder,
                digest=size.digest, index=len(items), num_in_prompt=len(media),
            )
        )  # fmt: skip
        tokens += [PLACEHOLDER] * size.width
    return tokens, items


class _Maker(Maker, SizeReader):
    num_places = 2

    async def size(self, data: bytes, kind: MediaKind = MEDIA_KIND_IMAGE) -> PutResponse:
        await asyncio.sleep(HEADER_SECONDS)
        return PutResponse(width=rows_in(data), height=1, num_bytes=len(data))

    async def make(self, file: bytes, item: MediaItem) -> Rows:
        await asyncio.sleep(TOWER_SECONDS)
        assert hashlib.sha256(file).digest() == item.digest, "the rows of another file"
        rows = rows_of(RowsKey(item.key, rows_in(file), item.levels))
        return Rows(rows.tobytes(), len(rows), HIDDEN_SIZE, ROW_TYPE_FLOAT32)


class SimulatedEncoder(EncoderService):
    """Serves with the real servicer, whose processes are simulated."""

    def __init__(self, settings: EncoderSettings, fingerprint: types_pb2.Fingerprint) -> None:
        super().__init__(settings)
        self._fingerprint = fingerprint

    async def start(self, host: Host) -> None:
        settings = self._settings
        self._files = MediaStore[Any](settings.media_files_bytes, settings.media_lease, asyncio.get_running_loop().time)
        cache = RowCache(settings.media_rows_bytes)
        self._undo.push_async_callback(cache.close)
        metrics = EncoderMetrics(host.metrics, self._files, cache)
        info = GetEncoderInfoResponse(
            fingerprint=self._fingerprint, media_kinds=[MEDIA_KIND_IMAGE], max_file_bytes=settings.max_image_bytes
        )
        maker = _Maker()
        self._servicer = EncoderServicer(self._files, cache, maker, info, metrics, maker)
        host.add_servicer(add_EncoderServicer_to_server, self._servicer)
        await self._join(host, info)

"""An encoder whose rows follow from the keys of items, and whose calls end as a test says."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from tests.engine_core.media import PLACEHOLDER, rows_of
from tests.services.engine.peer import make_add
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan, RowsKey
from tokenloom.engine_core.fake_workers.hash_row import embeds_ids
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens
from tokenloom.request import wire_errors
from tokenloom.v1 import encoder_pb2, encoder_pb2_grpc
from tokenloom.v1.encoder_pb2 import ROW_TYPE_BFLOAT16, ROW_TYPE_FLOAT32, RowChunk
from tokenloom.v1.engine_pb2 import AddRequest
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE, MediaItem, MediaRun


def item_rows(item: MediaItem, dtype: "encoder_pb2.RowType.ValueType" = ROW_TYPE_FLOAT32) -> np.ndarray[Any, Any]:
    rows = rows_of(RowsKey(item.key, item.num_rows, item.levels))
    if dtype == ROW_TYPE_BFLOAT16:
        rows = (rows.view("<u4") & 0xFFFF0000).view("<f4")
    return rows


class FakeEncoder(encoder_pb2_grpc.EncoderServicer):
    """Counts the calls for each key. ``faults`` are raised by the next calls, one each, before any row; ``gate`` stops
    all calls until it is set, as it is when the encoder is asked twice whether it is there; ``change`` alters each
    piece before it is sent; while it ``hangs``, it says nothing at all."""

    def __init__(self) -> None:
        self.calls: Counter[bytes] = Counter()
        self.requests: list[encoder_pb2.GetRequest] = []
        self.faults: list[BaseException] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.called = asyncio.Event()
        self.ended = asyncio.Event()
        self.rows_of_piece = 3
        self.dtype = ROW_TYPE_FLOAT32
        self.cut_after: list[int] = []
        """The next calls end without an error after so many pieces, one each."""
        self.change: Callable[[RowChunk], RowChunk] = lambda chunk: chunk
        self.hangs = False
        self.num_asked = 0

    async def Get(  # type: ignore[override]  # a generator
        self, request: encoder_pb2.GetRequest, context: Any
    ) -> AsyncIterator[RowChunk]:
        self.calls[request.item.key] += 1
        self.requests.append(request)
        self.called.set()
        try:
            await self.gate.wait()
            if self.faults:
                await wire_errors.abort(context, self.faults.pop(0))
            cut = self.cut_after.pop(0) if self.cut_after else None
            rows = item_rows(request.item, self.dtype)
            starts = range(request.first_row, len(rows), self.rows_of_piece)
            for start in starts[:cut]:
                piece = rows[start : start + self.rows_of_piece]
                data = (piece.view("<u4") >> 16).astype("<u2") if self.dtype == ROW_TYPE_BFLOAT16 else piece
                chunk = RowChunk(
                    first_row=start, num_rows=len(piece), width=piece.shape[1], rows=data.tobytes(), type=self.dtype
                )
                yield self.change(chunk)
        finally:
            self.ended.set()

    async def GetEncoderInfo(
        self, request: encoder_pb2.GetEncoderInfoRequest, context: Any
    ) -> encoder_pb2.GetEncoderInfoResponse:
        self.num_asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        elif self.num_asked == 2:
            self.gate.set()
        return encoder_pb2.GetEncoderInfoResponse()


@asynccontextmanager
async def running_encoder(directory: Path, encoder: FakeEncoder, name: str = "encoder") -> AsyncIterator[str]:
    """Serve it; the value is its address."""
    server = grpc.aio.server()
    encoder_pb2_grpc.add_EncoderServicer_to_server(encoder, server)
    address = f"unix:{directory}/{name}"
    server.add_insecure_port(address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def make_item(position: int, num_rows: int, address: str, key: str = "image", **fields: Any) -> MediaItem:
    run = MediaRun(position=position, num_tokens=num_rows)
    values = {"kind": MEDIA_KIND_IMAGE, "levels": 1, "num_rows": num_rows, "runs": [run], "encoder": address}
    return MediaItem(key=key.encode(), **{**values, **fields})


def make_media_add(slot: int, *items: MediaItem, length: int = 30, max_tokens: int = 5, **fields: Any) -> AddRequest:
    prompt = list(range(10, 10 + length))
    for item in items:
        for run in item.runs:
            prompt[run.position : run.position + run.num_tokens] = [PLACEHOLDER] * run.num_tokens
    add = make_add(slot, prompt, max_tokens, **fields)
    add.prompt.media.extend(items)
    return add


def expected_of(
    add: AddRequest, vocab_size: int, dtype: "encoder_pb2.RowType.ValueType" = ROW_TYPE_FLOAT32
) -> list[int]:
    prompt = list(add.prompt.token_ids)
    for item in add.prompt.media:
        rows = item_rows(item, dtype)
        for run in item.runs:
            part = rows[run.row_offset : run.row_offset + run.num_tokens]
            prompt[run.position : run.position + run.num_tokens] = embeds_ids(EmbedsSpan(run.position, part))
    return expected_tokens(prompt, add.sampling_params.max_tokens, vocab_size)

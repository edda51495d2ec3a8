"""Encoders behind a gateway: they take files, and lose them when a test says so."""

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx

from tests.services.gateway.fakes import FakeMesh
from tokenloom.request import errors, wire_errors
from tokenloom.services.runtime.host.listener import SERVER_OPTIONS
from tokenloom.v1 import encoder_pb2, encoder_pb2_grpc, tokenizer_pb2, types_pb2

IMAGE, AUDIO = types_pb2.MEDIA_KIND_IMAGE, types_pb2.MEDIA_KIND_AUDIO
VIDEO = types_pb2.MEDIA_KIND_VIDEO
SOUND = b"sound "
"""Before the number of samples in the file of a sound."""


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


class FakeEncoder(encoder_pb2_grpc.EncoderServicer):
    """Every file is an image or a video of 20 x 10, or a sound."""

    def __init__(self) -> None:
        self.files: dict[tuple[str, bytes, bytes], bytes] = {}  # by tenant, salt and digest
        self.pins: dict[str, list[bytes]] = {}  # digests by request
        self.released: asyncio.Queue[str] = asyncio.Queue()
        self.resets: list[encoder_pb2.ResetCachesRequest] = []
        self.lost_releases = 0  # of the next ones
        self.puts: list[encoder_pb2.PutHeader] = []
        self.error: errors.TokenloomError | None = None  # of all calls
        self.answering = asyncio.Event()  # it says nothing while this is not set
        self.answering.set()
        self.asked, self.num_asked = asyncio.Event(), asyncio.Semaphore(0)  # by any call
        self.was_left = asyncio.Event()  # by a call that was cancelled before its answer
        self.fetching = asyncio.Event()  # URLs are answered while it is set
        self.fetching.set()
        self.num_fetches = asyncio.Semaphore(0)
        self.urls: dict[str, bytes] = {"https://example.com/a.png": b"an image"}

    async def Put(self, messages: Any, context: Any) -> encoder_pb2.PutResponse:
        await self._check(context)
        first = await anext(messages)
        header, data = first.header, bytearray()
        async for message in messages:
            data += message.data
        self.puts.append(header)
        if header.url:
            self.num_fetches.release()
            await self.fetching.wait()
            if header.url not in self.urls:
                await wire_errors.abort(context, errors.PermissionDenied("its host is not allowed"))
            data = bytearray(self.urls[header.url])
        else:
            assert header.num_bytes == len(data)
            assert header.digest == hashlib.sha256(data).digest()
        if data.startswith(b"bad"):
            await wire_errors.abort(context, errors.InvalidArgument("the file is no image", "messages"))
        digest = hashlib.sha256(data).digest()
        self.files[header.tenant, header.cache_salt, digest] = bytes(data)
        self.pins.setdefault(header.request_id, []).append(digest)
        return _facts(digest, bytes(data), header.kind)

    async def Has(self, request: encoder_pb2.HasRequest, context: Any) -> encoder_pb2.HasResponse:
        await self._check(context)
        response = encoder_pb2.HasResponse()
        for digest in request.digest:
            data = self.files.get((request.tenant, request.cache_salt, digest))
            response.has.append(data is not None)
            facts = encoder_pb2.PutResponse() if data is None else _facts(digest, data, request.kind)
            response.facts.append(facts)
            if data is not None:
                self.pins.setdefault(request.request_id, []).append(digest)
        return response

    async def ReleaseFiles(
        self, request: encoder_pb2.ReleaseFilesRequest, context: Any
    ) -> encoder_pb2.ReleaseFilesResponse:
        if self.lost_releases:
            self.lost_releases -= 1
            await wire_errors.abort(context, errors.Unavailable("busy"))
        self.pins.pop(request.request_id, None)
        self.released.put_nowait(request.request_id)
        return encoder_pb2.ReleaseFilesResponse()

    async def ResetCaches(
        self, request: encoder_pb2.ResetCachesRequest, context: Any
    ) -> encoder_pb2.ResetCachesResponse:
        await self._check(context)
        self.resets.append(request)
        return encoder_pb2.ResetCachesResponse()

    async def GetEncoderInfo(
        self, request: encoder_pb2.GetEncoderInfoRequest, context: Any
    ) -> encoder_pb2.GetEncoderInfoResponse:
        await self.answering.wait()
        return encoder_pb2.GetEncoderInfoResponse()

    async def _check(self, context: Any) -> None:
        self.asked.set()
        self.num_asked.release()
        try:
            await self.answering.wait()
        except asyncio.CancelledError:
            self.was_left.set()
            raise
        if self.error is not None:
            await wire_errors.abort(context, self.error)


def _facts(digest: bytes, data: bytes, kind: types_pb2.MediaKind) -> encoder_pb2.PutResponse:
    if kind == VIDEO:
        return encoder_pb2.PutResponse(
            digest=digest, width=20, height=10, frames=8, frame_rate=4.0, num_bytes=len(data)
        )
    if data.startswith(SOUND):
        return encoder_pb2.PutResponse(
            digest=digest, samples=int(data.removeprefix(SOUND).split()[0]), num_bytes=len(data)
        )
    return encoder_pb2.PutResponse(digest=digest, width=20, height=10, num_bytes=len(data))


@dataclass(frozen=True)
class Vision:
    """A gateway whose model reads images, the encoders behind it, and a client."""

    mesh: FakeMesh
    encoders: Sequence[FakeEncoder]
    http: httpx.AsyncClient

    def held(self, data: bytes) -> list[int]:
        """Return which encoders have a file."""
        return [index for index, each in enumerate(self.encoders) if data in each.files.values()]

    @property
    def num_puts(self) -> int:
        return sum(len(each.puts) for each in self.encoders)

    @property
    def chats(self) -> list[tokenizer_pb2.EncodeChatRequest]:
        """The conversations that were encoded."""
        return [*self.mesh.tokenizer.chats, *self.mesh.second_tokenizer.chats]


@asynccontextmanager
async def with_encoders(
    mesh: FakeMesh, count: int = 1, kinds: Sequence[types_pb2.MediaKind] = (IMAGE, AUDIO, VIDEO)
) -> AsyncIterator[list[FakeEncoder]]:
    """Let a mesh, whose gateway has not started yet, read images and sounds."""
    mesh.tokenizer.media_kinds = mesh.second_tokenizer.media_kinds = kinds
    limits = types_pb2.ModelLimits(
        media_kinds=kinds,
        max_images_per_prompt=4,
        max_sounds_per_prompt=2,
        max_videos_per_prompt=1,
        max_media_rows=100,
    )
    limits.MergeFrom(mesh.coordinator.limits)
    mesh.coordinator.limits = limits
    async with AsyncExitStack() as stack:
        encoders = []
        for index in range(count):
            encoder, server = FakeEncoder(), grpc.aio.server(options=SERVER_OPTIONS)
            encoder_pb2_grpc.add_EncoderServicer_to_server(encoder, server)
            server.add_insecure_port(mesh.address(f"encoder-{index}"))
            await server.start()
            stack.push_async_callback(server.stop, 0)
            encoders.append(encoder)
            mesh.coordinator.encoders[f"encoder-{index}"] = mesh.address(f"encoder-{index}")
        yield encoders

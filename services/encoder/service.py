"""Runs the encoder as a service: loads a checkpoint's tower, serves, and stays in the coordinator's registry, so that
gateways find it."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc.aio
from google.protobuf.duration_pb2 import Duration

from tokenloom.model_files import model_path
from tokenloom.model_files.checkpoint import (
    IMAGE_FILES,
    VIDEO_FILE,
    digest_of,
    reads_images,
    reads_sounds,
    tokenizer_fingerprint,
    weights_fingerprint,
)
from tokenloom.request.errors import Aborted, FailedPrecondition, InvalidArgument, Unavailable
from tokenloom.request.wire_errors import of_exception
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.peers.hello import HELLO_SECONDS, check_hello, make_hello
from tokenloom.services.runtime.tasks import first_of
from tokenloom.v1 import coordinator_pb2, coordinator_pb2_grpc, types_pb2
from tokenloom.v1.encoder_pb2 import GetEncoderInfoResponse
from tokenloom.v1.encoder_pb2_grpc import add_EncoderServicer_to_server

from .encoder_servicer import EncoderMetrics, EncoderServicer
from .encoder_settings import EncoderSettings
from .media_fetcher import MediaFetcher
from .media_store import MediaStore
from .row_cache import RowCache
from .row_maker import ImageDecoders, MakerMetrics, RowMaker
from .sound_files import SoundDecoders, SoundFiles, SoundLimits

log = logging.getLogger(__name__)

MAX_FETCHED_SOUND_BYTES = 32 << 20
"""Of a sound at a URL, which is in memory until it has arrived; 16 are fetched at a time."""
REPORT_SECONDS = 1.0
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 1.0

_Call: TypeAlias = "grpc.aio.StreamStreamCall[coordinator_pb2.EngineReport, coordinator_pb2.EngineCommand]"


class EncoderService:
    """Serves ``Encoder``."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._settings = settings
        self._undo = contextlib.AsyncExitStack()
        self._servicer: EncoderServicer | None = None
        self._link: EncoderLink | None = None

    async def start(self, host: Host) -> None:
        """Load the tower, serve, and return when the encoder has joined its coordinator, if it has one.

        Raises ``InvalidArgument`` for a model that reads neither images nor sounds.
        """
        settings = self._settings
        if not settings.model:
            raise InvalidArgument("--model must name a checkpoint that reads images or sounds", "model")
        path = await asyncio.to_thread(model_path.resolve, settings.model, weights=True)
        hears = await asyncio.to_thread(reads_sounds, path)
        if not hears and not await asyncio.to_thread(reads_images, path):
            raise InvalidArgument(
                f"{path} reads neither images nor sounds: it has no vision_config, or no {IMAGE_FILES[0]}", "model"
            )
        fingerprint = await asyncio.to_thread(_fingerprint, path, settings)
        most = settings.sound_disk_bytes if hears else settings.media_files_bytes
        files = MediaStore[Any](most, settings.media_lease, asyncio.get_running_loop().time)
        cache = RowCache(settings.media_rows_bytes)
        metrics = EncoderMetrics(host.metrics, files, cache)
        preparer, reader = self._reader(path, metrics, files, hears=hears)
        maker = RowMaker(str(path), settings, MakerMetrics(metrics.decode, metrics.tower), preparer, hears=hears)
        self._undo.push_async_callback(maker.close)
        await maker.start()
        self._undo.push_async_callback(cache.close)
        if not preparer.is_confined:
            host.fall_backs.begin("unconfined", "this system has no filter of calls, or none that is known here")
        domains = settings.allowed_media_domains
        most = min(settings.max_sound_bytes, MAX_FETCHED_SOUND_BYTES) if hears else settings.max_image_bytes
        fetcher = MediaFetcher(domains, most) if domains else None
        info, names = self._info(maker, fingerprint), list(IMAGE_FILES)
        if isinstance(preparer, SoundDecoders):
            self._describe_sounds(info, preparer)
        elif preparer.reads_videos:
            info.media_kinds.append(types_pb2.MEDIA_KIND_VIDEO)
            info.max_video_bytes = settings.max_video_bytes
            names.append(VIDEO_FILE)
        info.processor = await asyncio.to_thread(digest_of, filter(Path.is_file, map(path.joinpath, names)))
        self._servicer = EncoderServicer(files, cache, maker, info, metrics, reader, fetcher, host.bill)
        host.add_servicer(add_EncoderServicer_to_server, self._servicer)
        await self._join(host, info)

    async def drain(self) -> None:
        """Let gateways put new files elsewhere, and return when no request needs one that is here."""
        if self._link is not None:
            self._link.drain()
        if self._servicer is not None:
            await self._servicer.until_unused()

    async def stop(self) -> None:
        await self._undo.aclose()

    def _reader(
        self, path: Path, metrics: EncoderMetrics, files: MediaStore[Any], *, hears: bool
    ) -> tuple[SoundDecoders | ImageDecoders, SoundFiles | ImageDecoders]:
        """Return what prepares files for the tower, and what reads them as they come."""
        settings = self._settings
        if not hears:
            images = ImageDecoders(str(path), settings)
            return images, images
        limits = SoundLimits(settings.max_sound_bytes, settings.sound_workers, settings.sound_folder)
        sounds = SoundDecoders(str(path), settings, metrics.read)
        return sounds, SoundFiles(files, sounds, limits, metrics.sound_seconds)

    def _info(self, maker: RowMaker, fingerprint: types_pb2.Fingerprint) -> GetEncoderInfoResponse:
        settings, lease = self._settings, Duration()
        lease.FromNanoseconds(round(settings.media_lease * 1e9))
        return GetEncoderInfoResponse(
            fingerprint=fingerprint,
            media_kinds=[types_pb2.MEDIA_KIND_IMAGE],
            max_file_bytes=settings.max_image_bytes,
            max_pixels=settings.max_image_pixels,
            row_width=maker.width,
            row_type=maker.row_type,
            lease=lease,
            fetches=bool(settings.allowed_media_domains),
        )

    def _describe_sounds(self, info: GetEncoderInfoResponse, decoders: SoundDecoders) -> None:
        info.ClearField("max_pixels")
        info.media_kinds[:] = [types_pb2.MEDIA_KIND_AUDIO]
        info.max_file_bytes = self._settings.max_sound_bytes
        info.sampling_rate, info.max_piece_samples = decoders.rate, decoders.max_samples

    async def _join(self, host: Host, info: GetEncoderInfoResponse) -> None:
        settings, servicer = self._settings, self._servicer
        if not settings.coordinator or servicer is None:
            return
        identity = coordinator_pb2.EngineIdentity(
            engine_id=settings.instance_id,
            epoch=host.epoch,
            address=settings.advertise_address or host.address,
            host=socket.gethostname(),
            fingerprint=info.fingerprint,
            limits=types_pb2.ModelLimits(media_kinds=info.media_kinds),
        )
        channel = await self._undo.enter_async_context(host.channels.open(settings.coordinator, "coordinator"))
        supervisor = "" if settings.state_file is None else f"{socket.gethostname()}:{settings.state_file}"
        self._link = link = EncoderLink(
            channel, identity, supervisor, lambda: (servicer.num_waiting, servicer.num_calls)
        )
        host.spawn(link.run(link.drain), name="encoder-coordinator")
        log.info("waiting for the coordinator")
        await link.joined.wait()


def _fingerprint(path: Path, settings: EncoderSettings) -> types_pb2.Fingerprint:
    name = settings.served_model_name or model_path.served_name(path, settings.model)
    return types_pb2.Fingerprint(model=name, weights=weights_fingerprint(path), tokenizer=tokenizer_fingerprint(path))


class EncoderLink:
    """Joins the coordinator, reports every second, and joins again after failures.

    Attributes:
        joined: Set when it has joined for the first time.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        identity: coordinator_pb2.EngineIdentity,
        supervisor: str,
        load: Callable[[], tuple[int, int]],
    ) -> None:
        """``supervisor``: as ``JoinFacts`` has it. ``load`` returns how many items wait, and how many are computed."""
        self._channel = channel
        self._identity = identity
        self._supervisor = supervisor
        self._load = load
        self._state = coordinator_pb2.ENGINE_STATE_SERVING
        self._changed = asyncio.Event()
        self._num_reports = 0
        self.joined = asyncio.Event()

    def drain(self) -> None:
        """Report from now on that the encoder drains."""
        self._state = coordinator_pb2.ENGINE_STATE_DRAINING
        self._changed.set()

    async def run(self, drain: Callable[[], None]) -> NoReturn:
        """Stay joined until cancelled. ``drain`` is called when the coordinator asks for it. Raises
        ``FailedPrecondition`` if another process has taken the encoder's name."""
        backoff, stub = MIN_BACKOFF_SECONDS, coordinator_pb2_grpc.CoordinatorStub(self._channel)
        reason, loop = "", asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._join(stub.Join(), drain)
            except Exception as failure:  # of any kind: it goes on serving meanwhile, and joins again
                error = of_exception(failure)
            if isinstance(error, Aborted):
                raise FailedPrecondition(f"removed from the coordinator's registry: {error.message}")
            if error.message != reason:  # not every second for as long as it lasts
                reason = error.message
                log.info("not in the coordinator's registry (%s); joining again until it succeeds", reason)
            if loop.time() - began > MAX_BACKOFF_SECONDS:
                backoff = MIN_BACKOFF_SECONDS
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)

    async def _join(self, call: _Call, drain: Callable[[], None]) -> NoReturn:
        try:
            first = self._report()
            first.hello.CopyFrom(make_hello(self._identity.engine_id, self._identity.epoch))
            first.identity.CopyFrom(self._identity)
            first.join.supervisor = self._supervisor
            await _write(call, first)
            async with asyncio.timeout(HELLO_SECONDS):
                answer = await _read(call)
            check_hello(answer.hello)
            log.info("joined coordinator %s", answer.hello.peer_id)
            self.joined.set()
            await first_of(self._write_reports(call), _read_commands(call, drain))
        finally:
            call.cancel()  # gRPC does not end a stream that is merely dropped
        raise AssertionError("neither task returns")

    async def _write_reports(self, call: _Call) -> NoReturn:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_SECONDS):
                    await self._changed.wait()
            self._changed.clear()
            await _write(call, self._report())

    def _report(self) -> coordinator_pb2.EngineReport:
        waiting, running = self._load()
        self._num_reports += 1
        return coordinator_pb2.EngineReport(
            role=types_pb2.ENGINE_ROLE_ENCODE,
            state=self._state,
            waiting=waiting,
            running=running,
            step=self._num_reports,  # it has none: one large image may take longer than any step of an engine
        )


async def _read_commands(call: _Call, drain: Callable[[], None]) -> NoReturn:
    while True:
        if (await _read(call)).HasField("drain"):
            drain()


async def _write(call: _Call, report: coordinator_pb2.EngineReport) -> None:
    """Write a report, unless the call has ended; reading from the call then raises the reason."""
    with contextlib.suppress(asyncio.InvalidStateError):
        await call.write(report)


async def _read(call: _Call) -> coordinator_pb2.EngineCommand:
    message = await call.read()
    if not isinstance(message, coordinator_pb2.EngineCommand):
        raise Unavailable("the coordinator ended the stream")
    return message

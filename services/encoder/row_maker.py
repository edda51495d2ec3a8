"""Makes rows: a file becomes pixels, or features, in one process and rows in another."""

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, Protocol

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper
from tokenloom.services.runtime.tasks import Tasks
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.v1.encoder_pb2 import PutResponse, RowType
from tokenloom.v1.types_pb2 import MediaItem, MediaKind

from .decode_worker import DecodeJob, DecodeReply, DecodeSetup
from .encoder_settings import EncoderSettings
from .pixel_slots import ONE_THREAD, PixelPart, PixelSlots, new_memory, read_all
from .tower_worker import GPU_BATCH, TowerInput, TowerJob, TowerReady, TowerReply, TowerSetup

DECODE_MEMORY_BYTES = 2 << 30
"""Of one image: 64 megapixels take 0.2 GB as they are decoded, and some processors enlarge what they get."""
HEADER_SECONDS = 1.0
"""Of processor time for a header. One process reads all of them, and 20 MB of empty chunks before the pixels, which
cost a stranger nothing, kept it busy for 5 to 8 s."""
VIDEO_MEMORY_BYTES = 3 << 30
"""Of one video: its patches, of which a slot takes 1 GiB, and the frames that its decoder holds."""
VIDEO_HEADER_SECONDS = 5.0
"""Of processor time to count the frames of a video and to decode the first one."""
BUSY = 6
"""As many times its processor time a video may take on a busy machine."""
START_SECONDS = 300.0
"""Decoders yield to all other work: beside thirty busy processes on two cores one took more than a minute to start."""
TOWER_START_SECONDS = 1800.0
"""Reading the largest towers from a slow disk."""
WAIT_SECONDS = 60.0
"""As long as one image may take to be decoded, on a busy machine."""
MAX_KILLERS = 1024
"""Files that have ended the tower, by digest."""
KILLER_SECONDS = 600.0
"""For which such a file is not tried again: what ended the tower may have been something else."""


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
    """Measures each image and each piece of a sound."""

    decode: Histogram
    tower: Histogram


class MediaPreparer(Protocol):
    """Makes of files what the tower computes."""

    is_confined: bool

    async def start(self, slots: tuple[int, ...]) -> None:
        """Start processes that have the slots, given by their descriptors."""

    async def close(self) -> None:
        """End the processes."""

    async def prepare(self, file: Any, item: MediaItem, slot: int) -> list[PixelPart]:
        """Write what the tower needs for an item to a slot."""


class ImageDecoders:
    """Reads images and videos, and prepares them. The processes for videos start with the first one.

    Attributes:
        is_confined: Whether the processes have no network.
        reads_videos: Whether the model is shown videos.
    """

    def __init__(self, path: str, settings: EncoderSettings) -> None:
        """``path``: the checkpoint's directory."""
        self._path, self._settings = path, settings
        self._headers = HelperPool(self._start_headers, 1, "read the image's header", WAIT_SECONDS)
        self._decoders = HelperPool(self._start_decoder, settings.image_workers, "decode the image", WAIT_SECONDS)
        self._video_headers = HelperPool(self._start_video_headers, 1, "read the video's header", WAIT_SECONDS)
        self._video_wait = max(WAIT_SECONDS, BUSY * settings.video_timeout)
        self._videos = HelperPool(self._start_videos, settings.image_workers, "decode the video", self._video_wait)
        self._slots: tuple[int, ...] = ()
        self.is_confined, self.reads_videos = True, False

    async def start(self, slots: tuple[int, ...]) -> None:
        """Start a process of both kinds. ``slots``: the descriptors of the memory for pixels. Raises as
        :meth:`.RowMaker.start`."""
        self._slots = slots
        async with asyncio.TaskGroup() as starting:
            for pool in (self._headers, self._decoders):
                starting.create_task(pool.start(), name="decode-process")

    async def close(self) -> None:
        """End the processes."""
        for pool in (self._headers, self._decoders, self._video_headers, self._videos):
            await pool.close()

    async def size(self, data: bytes, kind: MediaKind = MediaKind.MEDIA_KIND_IMAGE) -> PutResponse:
        """Return the size of an image, read from its header, or of a video, of which the first frame is decoded. Raises
        ``InvalidArgument`` for a file that is refused, and as :meth:`.HelperPool.run`."""
        is_video = kind == MediaKind.MEDIA_KIND_VIDEO
        pool, what = (self._video_headers, "video") if is_video else (self._headers, "image")
        try:
            reply = _decoded(await pool.run(msgspec.msgpack.encode(DecodeJob(data))))
        except errors.DeadlineExceeded:  # its own doing, so that no client should send it again
            raise errors.InvalidArgument(f"The {what}'s header takes too long to read.", "messages") from None
        except errors.ResourceExhausted as error:
            if not is_video:
                raise
            raise errors.InvalidArgument(error.message, "messages") from None
        return PutResponse(
            width=reply.width, height=reply.height, num_bytes=len(data), frames=reply.frames, frame_rate=reply.rate
        )

    async def prepare(self, data: bytes, item: MediaItem, slot: int) -> list[PixelPart]:
        """Write the pixels of an image, or of a video's frames, to a slot. Raises ``InvalidArgument`` for a file that
        cannot be decoded, and as :meth:`.HelperPool.run`."""
        job = DecodeJob(data, slot, item.options_json, item.num_in_prompt or 1)
        pool = self._videos if item.kind == MediaKind.MEDIA_KIND_VIDEO else self._decoders
        try:
            return _decoded(await pool.run(msgspec.msgpack.encode(job))).parts
        except (errors.DeadlineExceeded, errors.ResourceExhausted) as error:
            # The file's fault, so the client's: an engine repeats what finds no room for half a minute, and each try
            # ended a process.
            raise errors.InvalidArgument(error.message, "messages") from None

    async def _start_headers(self) -> HelperProcess:
        return await self._start_decoding("", HEADER_SECONDS)

    async def _start_decoder(self) -> HelperProcess:
        return await self._start_decoding(self._path, self._settings.image_timeout)

    async def _start_video_headers(self) -> HelperProcess:
        return await self._start_decoding("", VIDEO_HEADER_SECONDS, is_of_videos=True)

    async def _start_videos(self) -> HelperProcess:
        return await self._start_decoding(self._path, self._settings.video_timeout, is_of_videos=True)

    async def _start_decoding(self, path: str, seconds: float, *, is_of_videos: bool = False) -> HelperProcess:
        settings = self._settings
        setup = DecodeSetup(
            path,
            VIDEO_MEMORY_BYTES if is_of_videos else DECODE_MEMORY_BYTES,
            seconds,
            self._video_wait if is_of_videos and path else WAIT_SECONDS,
            settings.max_image_pixels,
            settings.max_video_seconds if is_of_videos else None,
        )
        packed, slots = msgspec.msgpack.encode(setup), self._slots if path else ()
        module = f"{__package__}.decode_worker"
        return await start_helper(module, packed, self._take_decoder, START_SECONDS, slots, ONE_THREAD)

    def _take_decoder(self, data: bytes) -> None:
        ready = _decoded(data, "model")
        self.is_confined = ready.is_confined and self.is_confined
        self.reads_videos = self.reads_videos or ready.reads_videos


@dataclass(slots=True, eq=False)
class _Job:
    """Waits for the tower, which frees its slot."""

    input: TowerInput
    rows: "asyncio.Future[Rows]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class RowMaker:
    """Owns the process that computes the tower, and the memory in which it finds its inputs.

    Attributes:
        num_places: Calls of :meth:`make` that may run at a time.
        width: Numbers in a row.
        row_type: How they are written.
    """

    def __init__(
        self,
        path: str,
        settings: EncoderSettings,
        metrics: MakerMetrics,
        preparer: MediaPreparer,
        *,
        hears: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``path``: the checkpoint's directory. ``hears``: whether it is a model of sounds. ``clock``: monotonic
        seconds."""
        self._path, self._settings, self._metrics = path, settings, metrics
        self._preparer = preparer
        self._hears = hears
        # A batch gathers while another one is computed; the slots of calls that were cancelled meanwhile are taken too.
        batch = settings.tower_batch or (GPU_BATCH if hears else 1)
        self.num_places = settings.image_workers + batch
        self._slots = PixelSlots(self.num_places + batch)
        self._rows = new_memory()
        self._towers = HelperPool(self._start_tower, 1, "encode the image", settings.tower_timeout)
        self._ready: deque[_Job] = deque()
        self._computing: asyncio.Task[None] | None = None
        self._tasks = Tasks(_never)
        self._most = 1
        self.width = 0
        self.row_type = RowType.ROW_TYPE_FLOAT32
        self._killers: dict[bytes, float] = {}  # with the ends of their times, the latest last
        self._clock = clock

    async def start(self) -> None:
        """Load the tower. Raises ``InvalidArgument`` for a checkpoint whose files cannot be read, ``Unavailable`` if a
        process does not start."""
        try:
            async with asyncio.TaskGroup() as starting:
                slots = tuple(self._slots.descriptors)
                for start in (self._preparer.start(slots), self._towers.start()):
                    starting.create_task(start, name="encoder-process")
        except ExceptionGroup as failures:
            raise _first(failures) from None

    async def close(self) -> None:
        """End the processes."""
        await self._tasks.close()
        await self._preparer.close()
        await self._towers.close()
        self._slots.close()
        os.close(self._rows)

    async def make(self, file: Any, item: MediaItem) -> Rows:
        """Return the rows of an item from its file. Not more than ``num_places`` calls at a time.

        Raises ``InvalidArgument`` for a file that cannot be computed, ``ResourceExhausted`` when the device has no room
        for it, ``Internal`` for one that has just ended the tower, and as :meth:`.HelperPool.run`.
        """
        self._check_killer(item.digest)
        slot = self._slots.take()
        try:
            began = time.monotonic()
            parts = await self._preparer.prepare(file, item, slot)
            self._metrics.decode.observe(time.monotonic() - began)
        except BaseException:
            self._slots.give_back(slot)
            raise
        job = _Job(TowerInput(slot, parts))
        self._ready.append(job)
        if self._computing is None or self._computing.done():
            self._computing = self._tasks.spawn(self._compute_all(), name="tower")
        try:
            return await job.rows
        except errors.Internal:
            self._note_killer(item.digest)
            raise
        finally:
            if job in self._ready:  # cancelled before its turn
                self._ready.remove(job)
                self._slots.give_back(slot)

    async def _compute_all(self) -> None:
        """Compute what is ready, until nothing is. A call that is cancelled ends nothing: the tower would have to be
        loaded anew, for minutes, and others wait for the same process."""
        while self._ready:
            jobs = [self._ready.popleft() for _ in range(min(self._most, len(self._ready)))]
            try:
                await self._compute([job for job in jobs if not job.rows.done()])
            finally:
                for job in jobs:
                    job.rows.cancel()
                    self._slots.give_back(job.input.slot)

    async def _compute(self, jobs: list[_Job]) -> None:
        began = time.monotonic()
        try:
            rows = await self._rows_of([job.input for job in jobs]) if jobs else []
        except Exception as error:  # of any kind: each call raises its own
            if len(jobs) > 1:  # one of them may be to blame for it
                for job in jobs:
                    await self._compute([job])
            elif not jobs[0].rows.done():
                jobs[0].rows.set_exception(error)
            return
        for job, each in zip(jobs, rows, strict=True):
            self._metrics.tower.observe((time.monotonic() - began) / len(jobs))
            if not job.rows.done():
                job.rows.set_result(each)

    async def _rows_of(self, inputs: list[TowerInput]) -> list[Rows]:
        answer = await self._towers.run(msgspec.msgpack.encode(TowerJob(inputs)))
        reply = msgspec.msgpack.decode(answer, type=TowerReply)
        what = "sound" if self._hears else "image"
        if reply.is_full:
            raise errors.ResourceExhausted(f"The encoder has no memory for the {what} now; retry.", retry_after=1.0)
        if reply.refused:
            raise errors.InvalidArgument(f"The model cannot encode the {what}: {reply.refused}.", "messages")
        if len(reply.num_rows) != len(inputs):
            raise errors.Internal("the tower answered for other files")
        row_bytes, offset = self.width * (2 if self.row_type == RowType.ROW_TYPE_BFLOAT16 else 4), 0
        rows = []
        for count in reply.num_rows:
            data = await asyncio.to_thread(read_all, self._rows, count * row_bytes, offset)
            rows.append(Rows(bytes(data), count, self.width, self.row_type))
            offset += len(data)
        return rows

    def _check_killer(self, digest: bytes) -> None:
        seconds = self._killers.get(digest, 0.0) - self._clock()
        if seconds > 0:
            raise errors.Internal(
                f"The tower ended while it computed this file, which is tried again in {seconds:.0f} s."
            )

    def _note_killer(self, digest: bytes) -> None:
        # The tower may take minutes to load, and no rows are computed meanwhile: a file that has ended it several times
        # does not do so again at once.
        self._killers.pop(digest, None)
        self._killers[digest] = self._clock() + KILLER_SECONDS
        if len(self._killers) > MAX_KILLERS:
            del self._killers[next(iter(self._killers))]

    async def _start_tower(self) -> HelperProcess:
        settings = self._settings
        setup = TowerSetup(
            self._path,
            settings.dtype,
            settings.device,
            settings.tower_threads,
            self._rows,
            self._hears,
            settings.tower_batch,
            settings.tower_quantization or "",
            settings.tower_graphs,
        )
        packed, passed = msgspec.msgpack.encode(setup), (*self._slots.descriptors, self._rows)
        return await start_helper(f"{__package__}.tower_worker", packed, self._take_tower, TOWER_START_SECONDS, passed)

    def _take_tower(self, data: bytes) -> None:
        ready = msgspec.msgpack.decode(data, type=TowerReady)
        if ready.refused:
            raise errors.InvalidArgument(ready.refused, "model")
        self.width, self._most = ready.width, ready.most
        self.row_type = RowType.ROW_TYPE_BFLOAT16 if ready.is_bfloat16 else RowType.ROW_TYPE_FLOAT32


def _decoded(data: bytes, field: str = "messages") -> DecodeReply:
    reply = msgspec.msgpack.decode(data, type=DecodeReply)
    if reply.refused:
        raise errors.InvalidArgument(reply.refused, field)
    return reply


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def _never(error: BaseException) -> NoReturn:
    raise AssertionError("a call of the tower returns its error") from error

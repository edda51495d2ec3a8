"""Owns the processes that decode sounds, and those that prepare pieces of them for the tower."""

import asyncio

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper
from tokenloom.services.runtime.telemetry.fast_metrics import Histogram
from tokenloom.v1.types_pb2 import MediaItem

from .encoder_settings import EncoderSettings
from .pixel_slots import ONE_THREAD, PixelPart
from .sound_files import PieceOptions, SoundFile
from .sound_worker import PieceJob, ReadJob, SoundReady, SoundReply, SoundSetup

MEMORY_BYTES = 512 << 20
"""Of one sound: the index of a day of MP4 takes 130 MB, and the samples of a piece with its spectrum 60."""
START_SECONDS = 300.0
WAIT_SECONDS = 60.0
"""As long as a piece may take, on a busy machine; a whole sound may take that or ``BUSY`` times its processor time."""
BUSY = 6


class SoundDecoders:
    """Reads sounds, and prepares their pieces.

    Attributes:
        rate: Samples a second that the model takes.
        max_samples: Of a piece.
        is_confined: Whether the processes have no network, and no files but those of their jobs.
    """

    def __init__(self, path: str, settings: EncoderSettings, seconds: Histogram) -> None:
        """``path``: the checkpoint's directory. ``seconds``: observes those that a whole sound takes."""
        self._path, self._settings, self._seconds = path, settings, seconds
        self._wait = max(WAIT_SECONDS, BUSY * settings.sound_timeout)
        self._readers = HelperPool(self._start_reader, settings.sound_workers, "decode the sound", self._wait)
        self._preparers = HelperPool(self._start_preparer, settings.image_workers, "prepare the sound", WAIT_SECONDS)
        self._ready = SoundReady()
        self._slots: tuple[int, ...] = ()
        self.is_confined = True

    @property
    def rate(self) -> int:
        return self._ready.rate

    @property
    def max_samples(self) -> int:
        return self._ready.max_samples

    async def start(self, slots: tuple[int, ...]) -> None:
        """Start a process of both kinds. ``slots``: the descriptors of the memory for features. Raises as
        :meth:`.RowMaker.start`."""
        self._slots = slots
        async with asyncio.TaskGroup() as starting:
            for pool in (self._readers, self._preparers):
                starting.create_task(pool.start(), name="sound-process")

    async def close(self) -> None:
        """End the processes."""
        for pool in (self._readers, self._preparers):
            await pool.close()

    async def read(self, source: SoundFile, target: SoundFile) -> None:
        """Write the samples of a file into another one. Raises ``InvalidArgument`` for a file that is not read, and as
        :meth:`.HelperPool.run`."""
        began = asyncio.get_running_loop().time()
        job, files = msgspec.msgpack.encode(ReadJob(source.num_bytes)), (source.descriptor, target.descriptor)
        try:
            answer = await self._readers.run(job, files)
        except errors.DeadlineExceeded:  # its own doing, so that no client should send it again
            limit = f"{self._settings.sound_timeout:g} s"
            raise errors.InvalidArgument(f"It takes more than {limit} to decode the sound.", "messages") from None
        except errors.ResourceExhausted as error:
            # Its own doing too. Gateways repeat what finds no room for a minute: each time the file was sent again, and
            # ended a process.
            raise errors.InvalidArgument(error.message, "messages") from None
        reply = _checked(answer)
        self._seconds.observe(asyncio.get_running_loop().time() - began)
        target.num_samples, target.peak = reply.num_samples, reply.peak

    async def prepare(self, sound: SoundFile, item: MediaItem, slot: int) -> list[PixelPart]:
        """Write the features of an item's piece to a slot. Raises ``InvalidArgument`` for what is no piece of the
        sound, and as :meth:`.HelperPool.run`."""
        total, margin = sound.num_samples, self._ready.margin
        piece = PieceOptions.of(item, total, self.max_samples)
        num = piece.samples or 0
        first, last = max(0, piece.start - margin), min(total, piece.start + num + margin)
        samples = await asyncio.to_thread(sound.samples, first, last)
        job = PieceJob(samples, slot, piece.start, num, total, sound.peak)
        return _checked(await self._preparers.run(msgspec.msgpack.encode(job))).parts

    async def _start_reader(self) -> HelperProcess:
        return await self._start(self._settings.sound_timeout, self._wait, ())

    async def _start_preparer(self) -> HelperProcess:
        return await self._start(self._settings.image_timeout, WAIT_SECONDS, self._slots)

    async def _start(self, seconds: float, wait_seconds: float, slots: tuple[int, ...]) -> HelperProcess:
        setup = SoundSetup(self._path, MEMORY_BYTES, seconds, wait_seconds, self._settings.max_sound_seconds)
        packed = msgspec.msgpack.encode(setup)
        module = f"{__package__}.sound_worker"
        return await start_helper(module, packed, self._take, START_SECONDS, slots, ONE_THREAD)

    def _take(self, data: bytes) -> None:
        ready = msgspec.msgpack.decode(data, type=SoundReady)
        if ready.refused:
            raise errors.InvalidArgument(ready.refused, "model")
        self._ready, self.is_confined = ready, self.is_confined and ready.is_confined


def _checked(data: bytes) -> SoundReply:
    reply = msgspec.msgpack.decode(data, type=SoundReply)
    if reply.refused:
        raise errors.InvalidArgument(reply.refused, "messages")
    if reply.is_full:
        raise errors.ResourceExhausted("The encoder's disk takes no sound now; retry.", retry_after=5.0)
    return reply

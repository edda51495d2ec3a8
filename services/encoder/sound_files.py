"""Takes sounds: their files go to disk as they arrive, become samples there, and are never whole in memory. Owns the
processes that decode them, and those that prepare pieces of them for the tower."""

import asyncio
import contextlib
import hashlib
import os
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol

import msgspec

from tokenloom.request import errors
from tokenloom.services.runtime.fair_stage import FairStage
from tokenloom.services.runtime.helper_process import HelperPool, HelperProcess, start_helper
from tokenloom.services.runtime.telemetry.fast_metrics import Counter, Histogram
from tokenloom.v1.encoder_pb2 import PutHeader, PutResponse
from tokenloom.v1.types_pb2 import MediaItem

from .encoder_settings import EncoderSettings
from .media_store import FileOwner, MediaStore, Room
from .pixel_slots import ONE_THREAD, PixelPart, read_all, write_all
from .sound_worker import SAMPLE_BYTES, PieceJob, ReadJob, SoundReady, SoundReply, SoundSetup

LOOK_SECONDS = 0.25
"""How often the disk that a sound takes is looked at while it is decoded: 20 MB of samples come in that time."""
MAX_WAITING = 1024
"""Sounds that wait to be decoded."""
LEAST_BYTES = 4 << 20
"""What a sound counts for at least: it takes a descriptor, of which 8 GiB of the smallest would take a million."""
MEMORY_BYTES = 512 << 20
"""Of one sound: the index of a day of MP4 takes 130 MB, and the samples of a piece with its spectrum 60."""
START_SECONDS = 300.0
WAIT_SECONDS = 60.0
"""As long as a piece may take, on a busy machine; a whole sound may take that or ``BUSY`` times its processor time."""
BUSY = 6


class SoundFile:
    """Holds bytes on disk, in a file without a name: nothing is left of it when the encoder ends, however it does.

    Attributes:
        descriptor: Closed by :meth:`close`, or when nothing refers to this any more: a sound that makes room may still
            be read.
        num_samples: Once its bytes are samples, float32 numbers of one channel.
        peak: As ``towers.sound_processor.Piece`` has it.
    """

    def __init__(self, folder: str, least_bytes: int = LEAST_BYTES) -> None:
        """``folder``: where the disk has room; empty: the system's folder for temporary files. ``least_bytes``: what it
        counts for at least. Raises ``ResourceExhausted`` if no file can be made there."""
        try:
            with tempfile.TemporaryFile(dir=folder or None) as file:
                self.descriptor = os.dup(file.fileno())
        except OSError as error:
            raise _disk_is_full(error) from error
        self._finalizer = weakref.finalize(self, os.close, self.descriptor)
        self._least_bytes = least_bytes
        self.num_samples = 0
        self.peak = 0.0

    def __len__(self) -> int:
        return max(self._least_bytes, self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """The bytes of the file now."""
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        """Give the disk back."""
        self._finalizer()

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes. Raises ``ResourceExhausted`` if the disk has no room."""
        try:
            write_all(self.descriptor, data, offset)
        except OSError as error:
            raise _disk_is_full(error) from error

    def samples(self, first: int, last: int) -> bytes:
        """Return the samples of a range."""
        return bytes(read_all(self.descriptor, (last - first) * SAMPLE_BYTES, first * SAMPLE_BYTES))


class PieceOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a piece of a sound: ``options_json`` of its item.

    Attributes:
        samples: Its samples; None: all from ``start`` on.
        start: Its first sample.
    """

    samples: int | None = None
    start: int = 0

    @classmethod
    def of(cls, item: MediaItem, num_samples: int, most: int) -> "PieceOptions":
        """Return those of an item of a sound of ``num_samples``, with both numbers. Raises ``InvalidArgument`` for what
        is no piece of it, or longer than ``most`` samples."""
        try:
            given = msgspec.json.decode(item.options_json or b"{}", type=cls)
        except msgspec.DecodeError as error:
            raise errors.InvalidArgument(f"options_json names no piece of a sound: {error}", "item") from None
        num = num_samples - given.start if given.samples is None else given.samples
        if not (0 < num <= most and 0 <= given.start <= num_samples - num):
            raise errors.InvalidArgument(
                f"Samples {given.start:,} to {given.start + num:,} are no piece of at most {most:,} of a sound of "
                f"{num_samples:,}.",
                "messages",
            )
        return cls(num, given.start)


class SoundReader(Protocol):
    """Decodes sounds; see :class:`.SoundDecoders`."""

    @property
    def rate(self) -> int:
        """Samples a second that it makes."""

    async def read(self, source: SoundFile, target: SoundFile) -> None:
        """Write the samples of a file into another one."""


@dataclass(frozen=True, slots=True)
class SoundLimits:
    """Says how much a sound may take, and where.

    Attributes:
        num_readers: Sounds that are decoded at a time.
        folder, least_bytes: As :class:`SoundFile` has them.
    """

    max_bytes: int
    num_readers: int
    folder: str
    least_bytes: int = LEAST_BYTES


class SoundFiles:
    """Takes the sounds of one encoder, and gives them to its store."""

    def __init__(
        self, files: MediaStore[SoundFile], reader: SoundReader, limits: SoundLimits, seconds: Counter
    ) -> None:
        """``seconds``: counts those of the sounds that were decoded."""
        self._files, self._reader, self._limits, self._seconds = files, reader, limits, seconds
        self._turns = FairStage(
            limits.num_readers,
            "sounds",
            max_waiting=MAX_WAITING,
            max_cost=MAX_WAITING * limits.max_bytes,
            leaves_spare=True,
        )

    async def put(self, header: PutHeader, parts: AsyncIterator[bytes]) -> PutResponse:
        """Keep a sound. ``parts``: of its file.

        Raises ``InvalidArgument`` for bytes that are not those of the header or hold no sound that is read,
        ``PayloadTooLarge`` for too many, and ``ResourceExhausted`` if the disk has no room.
        """
        with (
            self._files.arriving(header.tenant, max(header.num_bytes, self._limits.least_bytes)) as room,
            contextlib.closing(self._new_file()) as source,
        ):
            digest, num_bytes = await self._receive(parts, source, room, header.num_bytes)
            if header.digest and digest != header.digest:
                raise errors.InvalidArgument("The file's bytes are not those of its digest.", "digest")
            owner = FileOwner(header.tenant, header.cache_salt)
            if (facts := self._files.add_owner(owner, digest, header.request_id)) is not None:
                return facts
            await self._turns.begin(header.tenant, num_bytes)
            try:
                sound = await self._decode(source, room)
            finally:
                self._turns.end(header.tenant, num_bytes)
            self._seconds.inc(sound.num_samples // self._reader.rate)
            facts = PutResponse(digest=digest, samples=sound.num_samples, num_bytes=num_bytes)
            self._files.put(owner, sound, facts, header.request_id)
            return facts

    async def _receive(
        self, parts: AsyncIterator[bytes], source: SoundFile, room: Room, expected: int
    ) -> tuple[bytes, int]:
        """Write a file to disk. Returns its digest and its bytes. ``expected``: its bytes; 0: as many as come."""
        digest, num_bytes, most = hashlib.sha256(), 0, expected or self._limits.max_bytes
        async for part in parts:
            if num_bytes + len(part) > most and expected:
                raise _wrong_size(expected)
            if num_bytes + len(part) > most:
                raise errors.PayloadTooLarge(f"The file has more than {most:,} bytes.", "messages")
            room.grow_to(num_bytes + len(part))
            # In a thread: a disk that is busy holds up a write, and a digest takes 1 ms for 2 MB.
            await _ended(asyncio.to_thread(_take, part, source, num_bytes, digest.update))
            num_bytes += len(part)
        if expected and num_bytes < expected:
            raise _wrong_size(expected)
        if not num_bytes:
            raise errors.InvalidArgument("The file is empty.", "messages")
        return digest.digest(), num_bytes

    def _new_file(self) -> SoundFile:
        return SoundFile(self._limits.folder, self._limits.least_bytes)

    async def _decode(self, source: SoundFile, room: Room) -> SoundFile:
        """Return the samples of a file. It ends when they find no more room."""
        target = self._new_file()
        reading = asyncio.ensure_future(self._reader.read(source, target))
        try:
            while not (await asyncio.wait({reading}, timeout=LOOK_SECONDS))[0]:
                room.grow_to(len(source) + len(target))
            reading.result()
            room.grow_to(len(source) + len(target))
            return target
        except BaseException:
            reading.cancel()
            await asyncio.wait({reading})
            target.close()
            raise


async def _ended(call: Coroutine[None, None, None]) -> None:
    """Run a call in a thread to its end, also when it is cancelled: a write that still went on after its file was
    closed could reach another tenant's file, which has got the number of its descriptor."""
    running = asyncio.ensure_future(call)
    try:
        await asyncio.shield(running)
    finally:
        if not running.done():
            await asyncio.wait({running})


def _take(part: bytes, source: SoundFile, offset: int, hash_on: Callable[[bytes], None]) -> None:
    source.write(part, offset)
    hash_on(part)


def _wrong_size(expected: int) -> errors.InvalidArgument:
    return errors.InvalidArgument(f"the file does not have the {expected} bytes of its header", "data")


def _disk_is_full(error: OSError) -> errors.ResourceExhausted:
    return errors.ResourceExhausted(
        f"The encoder's disk takes no sound now ({error.strerror}); retry.", retry_after=5.0
    )


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

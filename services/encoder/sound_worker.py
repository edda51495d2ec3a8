"""Reads sounds of clients, in a process that can be killed: ``python -m tokenloom.services.encoder.sound_worker``.

The process has no torch, no network, no other programs, and no files but those that it is given; its memory and its
time are limited. It exchanges msgpack over its pipe: first ``SoundSetup``, answered by ``SoundReady``, then one
``SoundReply`` for each message: a ``ReadJob``, with the descriptors of the file and of the one for its samples, or a
``PieceJob``, whose features go to a slot of memory.
"""

import contextlib
import io
import logging
import os
import resource
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tokenloom.process import helper_pipe
from tokenloom.process.confinement import confine
from tokenloom.process.process_guard import yield_processors

from .pixel_slots import MAX_SLOT_BYTES, PixelPart, write_all, write_pixels

SAMPLE_BYTES = 4


class SoundSetup(msgspec.Struct, frozen=True):
    """Says what to prepare sounds for; the first message.

    Attributes:
        path: The checkpoint.
        memory_bytes: Of one job, beyond what the process has once it is ready.
        seconds: Of processor time, for one job.
        wait_seconds: For one job, on a busy machine.
        max_seconds: Of the longest sound.
    """

    path: str
    memory_bytes: int
    seconds: float
    wait_seconds: float
    max_seconds: float


class SoundReady(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says what the model takes, or why its sounds cannot be read.

    Attributes:
        rate: Samples a second.
        max_samples: Of a piece.
        margin: Samples on both sides of a piece that its features depend on.
    """

    refused: str = ""
    rate: int = 0
    max_samples: int = 0
    margin: int = 0
    is_confined: bool = True


class ReadJob(msgspec.Struct, frozen=True, tag="read"):
    """Asks for all samples of a file of so many bytes, as float32 numbers."""

    num_bytes: int


class PieceJob(msgspec.Struct, frozen=True, tag="piece"):
    """Carries the samples of a piece, with its margins.

    Attributes:
        slot: The descriptor of the memory for its features.
        start, num, total, peak: As ``towers.sound_processor.Piece`` has them.
    """

    samples: bytes
    slot: int
    start: int
    num: int
    total: int
    peak: float


class SoundReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Says how many samples were written and how loud they get, or where features lie, or why there are none.

    Attributes:
        is_full: Whether the disk had no room.
    """

    refused: str = ""
    num_samples: int = 0
    peak: float = 0.0
    parts: list[PixelPart] = []
    is_full: bool = False


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    if (first := helper_pipe.read_message()) is None:
        return
    setup = msgspec.msgpack.decode(first, type=SoundSetup)
    try:
        processor = _load(setup.path)
    except (ValueError, OSError) as error:
        helper_pipe.write_message(msgspec.msgpack.encode(SoundReady(refused=str(error))))
        return
    pipe = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    most = max(MAX_SLOT_BYTES, round((setup.max_seconds + 60) * processor.sampling_rate * SAMPLE_BYTES))
    yield_processors()  # an hour of sound takes many seconds
    helper_pipe.limit_memory(setup.memory_bytes)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    is_confined = confine(opens_files=False)
    margin = processor.margin if processor.sees_whole else 0
    ready = SoundReady("", processor.sampling_rate, processor.max_samples, margin, is_confined)
    helper_pipe.write_message(msgspec.msgpack.encode(ready))
    while True:
        helper_pipe.limit_time(0, 0)
        try:
            if (message := helper_pipe.read_message_with_files(pipe)) is None:
                return
            helper_pipe.limit_time(setup.seconds, setup.wait_seconds)
            reply = _answer(processor, *message, setup.max_seconds)
            helper_pipe.write_message(msgspec.msgpack.encode(reply))
        except MemoryError:
            os._exit(helper_pipe.OUT_OF_MEMORY)


def _load(path: str) -> Any:
    sys.modules["torch"] = sys.modules["torchvision"] = None  # type: ignore[assignment]  # as for images
    logging.disable(logging.WARNING)
    from tokenloom.gpu_worker.towers.sound_file import read_sound
    from tokenloom.gpu_worker.towers.sound_processor import PeakMeter, SoundProcessor

    processor = SoundProcessor(Path(path))
    samples = read_sound(_second_of_silence(), processor.sampling_rate)
    processor.features(samples)  # what is imported at the first sound is imported before no file can be opened
    PeakMeter(processor).add(samples)
    return processor


def _second_of_silence() -> bytes:
    head = struct.pack("<4sIHHIIHH4sI", b"fmt ", 16, 1, 1, 8000, 16_000, 2, 16, b"data", 16_000)
    return b"RIFF" + struct.pack("<I", 4 + len(head) + 16_000) + b"WAVE" + head + bytes(16_000)


def _answer(processor: Any, message: bytes, files: list[int], max_seconds: float) -> SoundReply:
    from tokenloom.gpu_worker.towers.sound_file import BadSound

    with contextlib.ExitStack() as opened:
        for descriptor in files:
            opened.callback(os.close, descriptor)
        try:
            job = msgspec.msgpack.decode(message, type=ReadJob | PieceJob)
            if isinstance(job, ReadJob):
                source, target = files
                return _read(processor, job, source, target, max_seconds)
            return _prepare(processor, job)
        except BadSound as error:
            return SoundReply(refused=str(error))
        except OSError:
            return SoundReply(is_full=True)


def _read(processor: Any, job: ReadJob, source: int, target: int, max_seconds: float) -> SoundReply:
    from tokenloom.gpu_worker.towers.sound_file import decode
    from tokenloom.gpu_worker.towers.sound_processor import PeakMeter

    os.ftruncate(target, 0)  # a process before this one may have ended over the same file
    meter, offset = PeakMeter(processor), 0
    for block in decode(_File(source), job.num_bytes, processor.sampling_rate, max_seconds):
        meter.add(block)
        offset = write_all(target, memoryview(block.data).cast("B"), offset)
    return SoundReply(num_samples=offset // SAMPLE_BYTES, peak=meter.peak())


def _prepare(processor: Any, job: PieceJob) -> SoundReply:
    from tokenloom.gpu_worker.towers.sound_processor import Piece

    piece = Piece(job.start, job.num, job.total, job.peak)
    features = processor.features(np.frombuffer(job.samples, np.float32), piece)
    return SoundReply(parts=write_pixels(job.slot, features))


class _File(io.RawIOBase):
    """Reads a descriptor whose position other processes share."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._size = os.fstat(descriptor).st_size
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        data = os.pread(self._descriptor, self._size if size < 0 else size, self._place)
        self._place += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, origin + offset)
        return self._place

    def tell(self) -> int:
        return self._place


if __name__ == "__main__":
    main()

"""Reads files of clients, in a process that can be killed: ``python -m tokenloom.services.encoder.decode_worker``.

The process has no torch, no network and no other programs; its memory and its time are limited. It exchanges msgpack
over its pipe: first ``DecodeSetup``, then one ``DecodeReply`` for each message. Pixels go to a slot of memory.
"""

import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.process import helper_pipe
from tokenloom.process.confinement import confine

from .pixel_slots import MAX_SLOT_BYTES, PixelPart, write_pixels

_NICENESS = 10
"""A large image takes seconds, and leaves the processors to what takes milliseconds."""


class DecodeSetup(msgspec.Struct, frozen=True):
    """Says what to prepare images for; the first message.

    Attributes:
        path: The checkpoint; empty: only sizes are read.
        memory_bytes: Of one image, beyond what the process has once it is ready.
        seconds: Of processor time, for one image.
        wait_seconds: For one image, on a busy machine.
    """

    path: str
    memory_bytes: int
    seconds: float
    wait_seconds: float
    max_pixels: int


class DecodeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries one file.

    Attributes:
        slot: The descriptor of the memory for its pixels; None: only its size is asked for.
        options_json: The processor's options; empty: the checkpoint's.
    """

    data: bytes
    slot: int | None = None
    options_json: bytes = b""
    num_in_prompt: int = 1


class DecodeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries the size of an image, or where its pixels lie, or why it is refused."""

    refused: str = ""
    width: int = 0
    height: int = 0
    parts: list[PixelPart] = []
    is_confined: bool = True


def main() -> None:
    """Serve until stdin ends."""
    helper_pipe.begin()
    if (first := helper_pipe.read_message()) is None:
        return
    setup = msgspec.msgpack.decode(first, type=DecodeSetup)
    import tokenloom.gpu_worker.towers.image_file  # noqa: F401  here: with Pillow, which the service has not

    try:
        processor = _load(setup.path) if setup.path else None
    except (ValueError, OSError) as error:
        helper_pipe.write_message(msgspec.msgpack.encode(DecodeReply(refused=str(error))))
        return
    os.nice(_NICENESS)  # only now: what starts with it, on a busy machine, was not ready within a minute
    ready = DecodeReply(is_confined=confine())
    helper_pipe.limit_memory(setup.memory_bytes)
    # The slots count as files, and not as this process's memory.
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_SLOT_BYTES, MAX_SLOT_BYTES))
    helper_pipe.write_message(msgspec.msgpack.encode(ready))
    while True:
        helper_pipe.limit_time(0, 0)
        try:
            if (message := helper_pipe.read_message()) is None:
                return
            helper_pipe.limit_time(setup.seconds, setup.wait_seconds)
            reply = _answer(processor, msgspec.msgpack.decode(message, type=DecodeJob), setup.max_pixels)
            helper_pipe.write_message(msgspec.msgpack.encode(reply))
        except MemoryError:
            os._exit(helper_pipe.OUT_OF_MEMORY)


def _load(path: str) -> Any:
    # transformers looks for torch, and its processors work without: importing it would take 300 MB and a second.
    sys.modules["torch"] = sys.modules["torchvision"] = None  # type: ignore[assignment]
    logging.disable(logging.WARNING)  # it says at each start that it has not found torch
    from tokenloom.gpu_worker.towers.processor import Processor

    processor = Processor(Path(path))
    processor.warm_up()  # what is imported at the first image is imported before the process confines itself
    return processor


def _answer(processor: Any, job: DecodeJob, max_pixels: int) -> DecodeReply:
    from tokenloom.gpu_worker.towers import image_file

    try:
        if job.slot is None:
            width, height = image_file.image_size(job.data, max_pixels)
            return DecodeReply(width=width, height=height)
        options = msgspec.json.decode(job.options_json, type=dict[str, Any]) if job.options_json else {}
        pixels = processor.pixels(job.data, options, num_in_prompt=job.num_in_prompt, max_pixels=max_pixels)
        return DecodeReply(parts=write_pixels(job.slot, pixels))
    except (image_file.BadImage, msgspec.DecodeError) as error:
        return DecodeReply(refused=str(error))
    except OSError:
        return DecodeReply(refused="The image has too many pixels once it is prepared.")


if __name__ == "__main__":
    main()

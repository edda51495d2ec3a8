"""Reads images and videos of clients, in a process that can be killed: ``python -m
tokenloom.services.encoder.decode_worker``.

The process has no torch, no network and no other programs; its memory and its time are limited. It exchanges msgpack
over its pipe: first ``DecodeSetup``, then one ``DecodeReply`` for each message. Pixels go to a slot of memory.
"""

import io
import logging
import os
import resource
import sys
from pathlib import Path
from typing import Any

import msgspec

from tokenloom.process import helper_pipe
from tokenloom.process.confinement import confine
from tokenloom.process.process_guard import yield_processors

from .pixel_slots import MAX_SLOT_BYTES, PixelPart, write_pixels


class DecodeSetup(msgspec.Struct, frozen=True):
    """Says what to prepare files for; the first message.

    Attributes:
        path: The checkpoint; empty: only sizes are read.
        memory_bytes: Of one file, beyond what the process has once it is ready.
        seconds: Of processor time, for one file.
        wait_seconds: For one file, on a busy machine.
        max_pixels: Of an image, or of a frame.
        video_seconds: Of the longest video; None: the files are images.
    """

    path: str
    memory_bytes: int
    seconds: float
    wait_seconds: float
    max_pixels: int
    video_seconds: float | None = None


class DecodeJob(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries one file.

    Attributes:
        slot: The descriptor of the memory for its pixels; None: only its size is asked for.
        options_json: The processor's options; empty: the checkpoint's. Of a video: which frames, and their size.
    """

    data: bytes
    slot: int | None = None
    options_json: bytes = b""
    num_in_prompt: int = 1


class DecodeReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """Carries the size of an image or a video, or where its pixels lie, or why it is refused.

    Attributes:
        frames, rate: As ``towers.video_file.VideoFacts`` has them.
        reads_videos: Whether the checkpoint's model is shown videos.
    """

    refused: str = ""
    width: int = 0
    height: int = 0
    frames: int = 0
    rate: float = 0.0
    reads_videos: bool = False
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
        if setup.video_seconds is not None:
            _warm_up_videos()
    except (ValueError, OSError) as error:
        helper_pipe.write_message(msgspec.msgpack.encode(DecodeReply(refused=str(error))))
        return
    yield_processors()  # only now: what starts with it, on a busy machine, was not ready within a minute
    helper_pipe.limit_memory(setup.memory_bytes)
    # The slots count as files, and not as this process's memory.
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_SLOT_BYTES, MAX_SLOT_BYTES))
    is_confined = confine(opens_files=setup.video_seconds is None)
    ready = DecodeReply(is_confined=is_confined, reads_videos=processor is not None and processor.reads_videos)
    helper_pipe.write_message(msgspec.msgpack.encode(ready))
    while True:
        helper_pipe.limit_time(0, 0)
        try:
            if (message := helper_pipe.read_message()) is None:
                return
            helper_pipe.limit_time(setup.seconds, setup.wait_seconds)
            reply = _answer(processor, msgspec.msgpack.decode(message, type=DecodeJob), setup)
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


def _warm_up_videos() -> None:
    """Import what the first video needs, whether it is a file or a list of pictures: later no file can be opened."""
    from PIL import Image

    from tokenloom.gpu_worker.towers.image_file import FORMATS, read_image
    from tokenloom.gpu_worker.towers.video_file import read_frames, video_facts

    for kind in FORMATS:
        picture = io.BytesIO()
        Image.new("RGB", (64, 64)).save(picture, kind)
        read_image(picture.getvalue())
    data = _first_video()
    video_facts(data)
    for frame in read_frames(data, [0]):
        frame.resize((28, 28), Image.Resampling.BICUBIC)


def _first_video() -> bytes:
    """Return a small file of one frame."""
    import av

    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream: Any = file.add_stream("mpeg4", rate=1, width=32, height=32)
        stream.pix_fmt = "yuv420p"
        file.mux(stream.encode(av.VideoFrame(32, 32, "yuv420p")))
        file.mux(stream.encode(None))
    return data.getvalue()


def _answer(processor: Any, job: DecodeJob, setup: DecodeSetup) -> DecodeReply:
    from tokenloom.gpu_worker.towers import image_file

    is_video = setup.video_seconds is not None
    try:
        if job.slot is None:
            return _video_size(job.data, setup) if is_video else _image_size(job.data, setup)
        options = msgspec.json.decode(job.options_json, type=dict[str, Any]) if job.options_json else {}
        if is_video:
            pixels = processor.frames(job.data, options, limits=_limits(setup), max_bytes=MAX_SLOT_BYTES)
        else:
            number, most = job.num_in_prompt, setup.max_pixels
            pixels = processor.pixels(job.data, options, num_in_prompt=number, max_pixels=most)
        return DecodeReply(parts=write_pixels(job.slot, pixels))
    except (image_file.BadImage, msgspec.DecodeError) as error:
        return DecodeReply(refused=str(error))
    except OSError:
        what = "video" if is_video else "image"
        return DecodeReply(refused=f"The {what} has too many pixels once it is prepared.")


def _image_size(data: bytes, setup: DecodeSetup) -> DecodeReply:
    from tokenloom.gpu_worker.towers.image_file import image_size

    width, height = image_size(data, setup.max_pixels)
    return DecodeReply(width=width, height=height)


def _video_size(data: bytes, setup: DecodeSetup) -> DecodeReply:
    from tokenloom.gpu_worker.towers.video_file import video_facts

    width, height, frames, rate = video_facts(data, _limits(setup))
    return DecodeReply(width=width, height=height, frames=frames, rate=rate)


def _limits(setup: DecodeSetup) -> Any:
    from tokenloom.gpu_worker.towers.video_file import VideoLimits

    assert setup.video_seconds is not None, "it reads videos"
    return VideoLimits(setup.max_pixels, setup.video_seconds)


if __name__ == "__main__":
    main()

"""Videos for tests, written with FFmpeg's own encoders."""

import base64
import io
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

LISTED = b"data:video/jpeg;base64,"

Frames = Sequence[npt.NDArray[np.uint8]]
KINDS = {
    "mp4": ("mp4", "h264"),
    "mov": ("mov", "mpeg4"),
    "webm": ("webm", "libvpx"),
    "webm-vp9": ("webm", "libvpx-vp9"),
    "mkv": ("matroska", "h264"),
    "avi": ("avi", "mpeg4"),
    "mpeg": ("mpeg", "mpeg2video"),
}
"""Containers and codecs."""


def shades(count: int, width: int = 64, height: int = 48, seed: int = 0) -> list[npt.NDArray[np.uint8]]:
    """Return frames [height, width, 3], each of which has a shade of its own below fields that move."""
    fields = np.random.default_rng(seed).integers(0, 255, (3, 8, 3), dtype=np.uint8)
    above = np.asarray(Image.fromarray(fields).resize((width, height * 3 // 4), Image.Resampling.NEAREST))
    frames = []
    for number in range(count):
        frame = np.full((height, width, 3), number * 240 // max(count, 1) + 8, np.uint8)
        frame[: len(above)] = np.roll(above, number * width // max(count, 1), axis=1)
        frames.append(frame)
    return frames


def video(frames: Frames, kind: str = "mp4", rate: float = 10, **options: Any) -> bytes:
    """Return a file of frames. ``options``: of the encoder."""
    container, codec = KINDS[kind]
    data = io.BytesIO()
    with av.open(data, "w", format=container) as file:
        height, width, _ = frames[0].shape
        stream: Any = file.add_stream(
            codec, rate=Fraction(rate).limit_denominator(1000), width=width, height=height, options=options
        )
        stream.pix_fmt = "yuv420p"
        stream.codec_context.bit_rate = 4_000_000
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))
    return data.getvalue()


def listed(frames: Frames, kind: str = "PNG") -> bytes:
    """Return a list of pictures, as clients of vLLM write it."""
    return LISTED + b",".join(base64.b64encode(_file(frame, kind)) for frame in frames)


def _file(frame: npt.NDArray[np.uint8], kind: str) -> bytes:
    data = io.BytesIO()
    Image.fromarray(frame).save(data, kind)
    return data.getvalue()

"""Reads videos: how many frames there are and how large they are, and those that a model is shown. Needs neither torch
nor transformers.

A file is a video in a container, of which only the pictures are read, or a list of pictures as vLLM writes it:
``data:video/jpeg;base64,`` and the base64 of each, with commas between them; ``;fps=2`` before ``;base64`` says how
many a second has. The container is chosen here, by the first bytes, and nothing is left to guess to the libraries of
FFmpeg; see :mod:`.sound_file`.
"""

import base64
import binascii
import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import av.error
from PIL import Image

from .image_file import MAX_PIXELS, MAX_RATIO, BadImage, image_size, read_image
from .sound_file import open_container, use_alone

_LISTED = re.compile(rb"data:video/jpeg(?:;fps=([^;,]{0,20}))?;base64,", re.IGNORECASE)
"""Begins a list of pictures."""
UNKNOWN_RATE = 24.0
"""Frames in a second where the file does not say, as the processors of transformers have it."""
MAX_SECONDS = 600.0
MAX_FRAMES = 1 << 20
"""Of a file, whatever it says of its length."""
MAX_LISTED = 1 << 14
"""Pictures of a list."""
_LONGEST_HEAD = 64
_RATES = (0.01, 1000.0)
_MAX_DRIFT = 0.1
"""By which the rate that a file states may differ from that of its time stamps: browsers write rates that are not."""
_FORMATS = ("MP4", "MOV", "WebM", "MKV", "AVI", "MPEG", "Ogg")
_NAMES = """
    av1 h263 h264 hevc libdav1d libvpx libvpx-vp9 mjpeg mpeg1video mpeg2video mpeg4 msmpeg4v2 msmpeg4v3 theora vp8 vp9
    """
_CODECS = frozenset(_NAMES.split())
"""Decoders that may run."""
_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
"""By the degrees, counterclockwise, by which a frame is to be turned."""


class BadVideo(BadImage):
    """A video that is not taken; the message may be shown to clients."""


class VideoFacts(NamedTuple):
    """Describes a video as it is shown.

    Attributes:
        width, height: Pixels of a frame.
        frames: How many there are.
        rate: Frames in a second; 0: it is a list of pictures.
    """

    width: int
    height: int
    frames: int
    rate: float


@dataclass(frozen=True)
class VideoLimits:
    """Says what is read. ``max_pixels``: of a frame. ``max_seconds``: of a video, at its own rate."""

    max_pixels: int = MAX_PIXELS
    max_seconds: float = MAX_SECONDS


USUAL_LIMITS = VideoLimits()


def video_facts(data: bytes, limits: VideoLimits = USUAL_LIMITS) -> VideoFacts:
    """Return what a video is; of its frames only the first one is decoded. Raises :class:`BadVideo`."""
    if (listed := _listed(data)) is not None:
        sizes = [image_size(each, limits.max_pixels) for each in listed]
        return VideoFacts(*sizes[0], len(listed), _listed_rate(data))
    with _opened(data, limits) as container:
        stream = _stream(container, limits)
        stamps = _stamps(container, stream)
        rate = _rate(stream, stamps)
        if len(stamps) > limits.max_seconds * rate:
            seconds = len(stamps) / rate
            raise BadVideo(f"The video lasts {seconds:.1f} s; at most {limits.max_seconds:g} s are taken.")
    width, height = next(read_frames(data, [0], limits)).size
    if max(width, height) > MAX_RATIO * min(width, height):
        raise BadVideo(f"The video has {width} x {height} pixels; the ratio of its sides may be at most {MAX_RATIO}.")
    return VideoFacts(width, height, len(stamps), rate)


def read_frames(data: bytes, indices: Sequence[int], limits: VideoLimits = USUAL_LIMITS) -> Iterator[Image.Image]:
    """Yield frames as RGB, one for each of ``indices``, which do not descend.

    Where the file ends before the last of them, though at least half of them are there, its last frame is shown again,
    as players do. Raises :class:`BadVideo` for a file that cannot be decoded, or has fewer.
    """
    if (listed := _listed(data)) is not None:
        for index in indices:
            if index >= len(listed):
                raise BadVideo(f"The video has {len(listed)} pictures, and no one at index {index}.")
            yield read_image(listed[index], limits.max_pixels)
        return
    wanted, num_found, last = iter(indices), 0, None
    due = next(wanted, None)
    with _opened(data, limits) as container:
        for place, frame in enumerate(_frames(container, _stream(container, limits))):
            last = frame
            while due is not None and due <= place:
                yield _picture(frame)
                num_found, due = num_found + 1, next(wanted, None)
            if due is None:
                return
        if last is None or 2 * num_found < len(indices):
            raise BadVideo("The video is damaged or incomplete.")
        for _ in range(len(indices) - num_found):
            yield _picture(last)


def _listed(data: bytes) -> list[bytes] | None:
    """Return the pictures of a list; None: the file is a video. One picture alone is a list of one."""
    if data[:3] == b"\xff\xd8\xff":
        return [data]
    if (head := _LISTED.match(data[:_LONGEST_HEAD])) is None:
        return None
    if (count := data.count(b",")) > MAX_LISTED:
        raise BadVideo(f"The video is a list of {count:,} pictures; at most {MAX_LISTED:,} are taken.")
    try:
        return [base64.b64decode(each, validate=True) for each in data[head.end() :].split(b",")]
    except (binascii.Error, ValueError):
        raise BadVideo("The video is a list of pictures of which one is not base64.") from None


def _listed_rate(data: bytes) -> float:
    """Return how many pictures of a list a second has; 0: it does not say."""
    head = _LISTED.match(data[:_LONGEST_HEAD])
    if head is None or head[1] is None:
        return 0.0
    low, high = _RATES
    try:
        rate = float(head[1])
    except ValueError:
        rate = 0.0
    if not low <= rate <= high:
        raise BadVideo(f"fps of a list of pictures must be from {low:g} to {high:g}.")
    return rate


@contextmanager
def _opened(data: bytes, limits: VideoLimits) -> Iterator[Any]:
    """Open a container. Raises :class:`BadVideo` for what its users raise too, if it is the file's fault."""
    try:
        with open_container(io.BytesIO(data), _format(data), _CODECS) as container:
            yield container
    except (av.error.FFmpegError, EOFError) as error:
        if isinstance(error, MemoryError):
            raise MemoryError from None
        raise BadVideo("The video is damaged or incomplete.") from error


def _format(data: bytes) -> str:
    """Return what FFmpeg calls the container of a file."""
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"):
        return "mov"
    for mark, name in ((b"OggS", "ogg"), (b"\x1a\x45\xdf\xa3", "matroska"), (b"\0\0\1\xba", "mpeg")):
        if data.startswith(mark):
            return name
    raise BadVideo(f"The video is not one of {', '.join(_FORMATS)}.")


def _stream(container: Any, limits: VideoLimits) -> Any:
    """Return the first stream of pictures, ready to be decoded."""
    if not container.streams.video:
        raise BadVideo("The file has no pictures.")
    stream = container.streams.video[0]
    if unread := use_alone(container, stream, _CODECS):
        raise BadVideo(f"The video is coded in a way that is not read ({unread}).")
    context = stream.codec_context
    width, height = context.width, context.height
    if width * height > limits.max_pixels:
        raise BadVideo(f"The video has {width} x {height} pixels; at most {limits.max_pixels:,} are taken.")
    # Whatever the container says, a decoder allocates no larger frame than this.
    context.options = {"max_pixels": str(limits.max_pixels)}
    return stream


def _stamps(container: Any, stream: Any) -> list[float]:
    """Return the times of all frames in seconds, in their order; nothing is decoded."""
    stamps, base = list[float](), float(stream.time_base or 0)
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:
            continue
        stamp = packet.dts if packet.pts is None else packet.pts
        stamps.append(len(stamps) if stamp is None else stamp * base)
        if len(stamps) > MAX_FRAMES:
            raise BadVideo(f"The video has more than {MAX_FRAMES:,} frames.")
    if not stamps:
        raise BadVideo("The video has no frames.")
    return sorted(stamps)


def _rate(stream: Any, stamps: Sequence[float]) -> float:
    """Return how many frames a second has: as the file states, if its time stamps agree."""
    stated = float(stream.average_rate or 0)
    seconds = stamps[-1] - stamps[0]
    measured = (len(stamps) - 1) / seconds if seconds > 0 else 0.0
    if measured and abs(stated - measured) > _MAX_DRIFT * measured:
        stated = measured
    low, high = _RATES
    return stated if math.isfinite(stated) and low <= stated <= high else UNKNOWN_RATE


def _frames(container: Any, stream: Any) -> Iterator[Any]:
    """Yield all frames in the order in which they are shown; damaged ones are left out."""
    for packet in container.demux(stream):
        try:
            yield from packet.decode()
        except (av.error.InvalidDataError, av.error.PatchWelcomeError):
            continue


def _picture(frame: Any) -> Image.Image:
    picture: Image.Image = frame.to_image()
    turn = _TURNS.get(frame.rotation % 360)
    return picture if turn is None else picture.transpose(turn)

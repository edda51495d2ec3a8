"""Videos that are longer, larger, other, or elsewhere than they seem."""

import base64
import struct
from collections.abc import Callable
from functools import partial

import numpy as np

from tests.attack.attack import Attack, Outcome
from tests.attack.images import picture
from tests.attack.media_files import MAX_RSS_MIB, FileAttack, base64_of, many
from tests.attack.sounds import ELSEWHERE
from tests.attack.target import Setup, Target
from tests.gpu_worker.towers.sound_files import encoded, tone
from tests.gpu_worker.towers.test_image_file import bomb
from tests.gpu_worker.towers.video_files import KINDS, LISTED, listed, shades, video

SETUP = Setup(reads_videos=True, flags=("--max-video-seconds", "60"))


def clip(kind: str = "mp4", count: int = 12, width: int = 64, height: int = 48, rate: float = 10) -> bytes:
    """Return a file."""
    return video(shades(count, width, height), kind, 25 if kind == "mpeg" else rate)


def noise(kind: str) -> bytes:
    """Return the begin of a file, and then noise."""
    return clip(kind)[:600] + np.random.default_rng(0).bytes(100_000)


def many_samples() -> bytes:
    """Return a MP4 whose index says that it has 2^31 frames."""
    file = bytearray(clip("mov"))
    place = file.index(b"stsz")
    file[place + 8 : place + 16] = struct.pack(">II", 1, 1 << 31)
    return bytes(file)


def sized(width: int, height: int) -> bytes:
    """Return a MP4 whose container says that frames are so large; they are not."""
    file = bytearray(clip("mov"))
    place = file.index(b"mp4v") + 28
    file[place : place + 4] = struct.pack(">HH", width, height)
    return bytes(file)


HARMLESS: dict[str, Callable[[], bytes]] = {
    "mp4-then-zip": lambda: clip() + b"PK\x03\x04" + bytes(4096),
    "cut": lambda: clip("mkv", 40, 160, 120)[:-2000],
    "pictures": lambda: listed(shades(3)),
}
"""They are what they say, and more that is not looked at."""
HARMFUL: dict[str, Callable[[], bytes]] = {
    "long": partial(clip, count=1000, width=32, height=32),
    "bomb": lambda: LISTED + b",".join([base64.b64encode(bomb(16_384, 16_384))] * 2),
    "many-pictures": lambda: LISTED + b",".join([base64.b64encode(picture(width=8, height=8))] * 20_000),
    "commas": lambda: LISTED + b"," * 1_000_000,
    "many-samples": many_samples,
    "cut-index": lambda: clip()[:900],
    "cut-header": lambda: clip("webm")[:40],
    "sound": lambda: encoded(tone(1.0), "mp4", "aac"),
    "png": lambda: b"\x89PNG\r\n\x1a\n" + bytes(100),
    "html-then-mp4": lambda: b"<html>" + clip(),
    "empty": bytes,
}


ODD: dict[str, Callable[[], bytes]] = {
    **{f"noise-{kind}": partial(noise, kind) for kind in KINDS},
    "huge-frames": partial(sized, 65_535, 65_535),
    "other-frames": partial(sized, 4000, 20),
}
"""A part of them may be a video."""


def _part(file: bytes) -> dict[str, object]:
    url = file.decode() if file.startswith(LISTED) else "data:video/mp4;base64," + base64_of(file)
    return {"type": "video_url", "video_url": {"url": url}}


files = FileAttack(_part, clip, HARMLESS, HARMFUL, ODD, ELSEWHERE).run


def many_videos(target: Target, num: int = 1100) -> Outcome:
    """Send one request with so many videos."""
    return many(target, _part, clip(count=2, width=32, height=32), num)


ATTACKS = [
    Attack("video-files", files, SETUP, max_rss=MAX_RSS_MIB),
    Attack("video-many", many_videos, SETUP, max_rss=MAX_RSS_MIB),
]

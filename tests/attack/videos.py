"""Videos that are longer, larger, other, or elsewhere than they seem."""

import base64
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from tests.attack.attack import Attack, Outcome
from tests.attack.images import MAX_ENCODER_MIB, MAX_RSS_MIB, encoder_memory, listener, picture
from tests.attack.sounds import ELSEWHERE
from tests.attack.target import MODEL, Setup, Target
from tests.attack.wire import request
from tests.gpu_worker.towers.sound_files import encoded, tone
from tests.gpu_worker.towers.test_image_file import bomb
from tests.gpu_worker.towers.video_files import KINDS, LISTED, listed, shades, video

SETUP = Setup(reads_videos=True, flags=("--max-video-seconds", "60"))
_REFUSED = {400, 403, 413, 422, 429, 503}
_CHAT = "/v1/chat/completions"


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


def _ask(target: Target, *files: bytes) -> tuple[int, Any]:
    parts = []
    for file in files:
        url = file.decode() if file.startswith(LISTED) else "data:video/mp4;base64," + base64.b64encode(file).decode()
        parts.append({"type": "video_url", "video_url": {"url": url}})
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    return request(target, target.key, _CHAT, model=MODEL, messages=messages, max_tokens=4)


def _served(target: Target) -> None:
    status, answer = _ask(target, clip())
    assert status == 200, answer


def files(target: Target, names: tuple[str, ...] = (), at_once: int = 4) -> Outcome:
    """Send each file several times at once. What is harmless is answered, what is not is refused, and what names
    another host reaches none."""
    _served(target)
    wrong = []
    odd = {f"noise-{kind}": partial(noise, kind) for kind in KINDS} | {
        "huge-frames": partial(sized, 65_535, 65_535),
        "other-frames": partial(sized, 4000, 20),
    }
    with listener() as (port, reached):
        named = {name: partial(make, port) for name, make in ELSEWHERE.items()}
        for name, make in (HARMLESS | HARMFUL | odd | named).items():
            if names and name not in names:
                continue
            file = make()
            with ThreadPoolExecutor(at_once) as pool:
                statuses = {status for status, _ in pool.map(lambda _, file=file: _ask(target, file), range(at_once))}
            expected = {200} if name in HARMLESS else _REFUSED
            if name in odd:  # a part of it may be a video
                expected = _REFUSED | {200}
            if not statuses <= expected:
                wrong.append(f"{name} was answered with {statuses}")
    wrong += [f"{address} was connected to" for address in reached]
    _served(target)
    if (memory := encoder_memory(target)) > MAX_ENCODER_MIB:
        wrong.append(f"the encoder's processes have {memory:.0f} MiB")
    return Outcome(f"encoder {memory:.0f} MiB", wrong)


def many_videos(target: Target, num: int = 1100) -> Outcome:
    """Send one request with so many videos."""
    _served(target)
    status, _ = _ask(target, *[clip(count=2, width=32, height=32)] * num)
    return Outcome(str(status), [] if status in _REFUSED else [f"answered with {status}"])


ATTACKS = [
    Attack("video-files", files, SETUP, max_rss=MAX_RSS_MIB),
    Attack("video-many", many_videos, SETUP, max_rss=MAX_RSS_MIB),
]

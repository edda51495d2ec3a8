"""Sounds that are longer, other, or elsewhere than they seem."""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from tests.attack.attack import Attack, Outcome
from tests.attack.media_files import MAX_RSS_MIB, FileAttack, base64_of, many
from tests.attack.target import Setup, Target
from tests.gpu_worker.towers.sound_files import KINDS, encoded, flac_bomb, tone

SETUP = Setup(reads_sounds=True)
_ELSEWHERE = "http://127.0.0.1:{port}/a.wav"


def sound(kind: str = "wav", seconds: float = 1.0, **options: Any) -> bytes:
    """Return a file."""
    container, codec = KINDS[kind]
    rate = 48_000 if "opus" in codec else 16_000
    return encoded(tone(seconds, rate), container, codec, rate, **options)


def noise(kind: str) -> bytes:
    """Return the begin of a file, and then noise."""
    return sound(kind)[:64] + np.random.default_rng(0).bytes(100_000)


def many_samples() -> bytes:
    """Return a MP4 whose index says that it has 2^31 samples."""
    file = bytearray(sound("m4a"))
    place = file.index(b"stsz")
    file[place + 8 : place + 16] = struct.pack(">II", 1, 1 << 31)
    return bytes(file)


def elsewhere(url: bytes, kind: bytes = b"url ") -> bytes:
    """Return a MOV that says that its sound lies at a URL, or at that of an alias (``alis``)."""
    file = bytearray(encoded(tone(1.0), "mov", "pcm_s16le"))
    boxes = [file.index(name) for name in (b"url \0\0\0\1", b"dref", b"dinf", b"minf", b"mdia", b"trak", b"moov")]
    target = url + b"\0"
    if kind == b"alis":
        names = bytes(10) + b"\4disk" + bytes(23) + bytes(12) + b"\5a.wav" + bytes(58) + bytes(16)
        target = names + bytes(20) + struct.pack(">hh", 2, len(url)) + url + b"\0" * (len(url) % 2) + b"\xff\xff\0\0"
    file[boxes[0] : boxes[0] + 8] = kind + bytes(4) + target
    for box in boxes:
        (size,) = struct.unpack(">I", file[box - 4 : box])
        file[box - 4 : box] = struct.pack(">I", size + len(target))
    return bytes(file)


def _playlist(port: int) -> bytes:
    return f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{_ELSEWHERE.format(port=port)}\n#EXT-X-ENDLIST\n".encode()


HARMLESS: dict[str, Callable[[], bytes]] = {
    "wav-then-zip": lambda: sound() + b"PK\x03\x04" + bytes(4096),
    "mp3-then-html": lambda: sound("mp3") + b"<script>alert(1)</script>",
    "video": partial(encoded, tone(1.0), "mp4", "aac", picture=True),
    "cut": lambda: sound("mp3", 4.0)[:20_000],
}
"""They are what they say, and more that is not looked at."""
HARMFUL: dict[str, Callable[[], bytes]] = {
    "bomb": partial(flac_bomb, 86_000),
    "long": partial(sound, seconds=40.0),
    "short": partial(sound, seconds=0.05),
    "cut-index": lambda: sound("m4a")[:2000],
    "cut-header": lambda: sound("flac")[:30],
    "many-samples": many_samples,
    "empty": bytes,
    "png": lambda: b"\x89PNG\r\n\x1a\n" + bytes(100),
    "html-then-wav": lambda: b"<html>" + sound(),
}
ELSEWHERE: dict[str, Callable[[int], bytes]] = {
    "playlist": _playlist,
    "tagged-playlist": lambda port: b"ID3\x04\0\0\0\0\0\0" + _playlist(port),
    "list": lambda port: f"ffconcat version 1.0\nfile '{_ELSEWHERE.format(port=port)}'\n".encode(),
    "concat": lambda port: f"concat:{_ELSEWHERE.format(port=port)}|file:///etc/passwd".encode(),
    "dash": lambda port: f"<?xml version='1.0'?><MPD><BaseURL>{_ELSEWHERE.format(port=port)}</BaseURL></MPD>".encode(),
    "session": lambda port: f"v=0\nc=IN IP4 127.0.0.1\nm=audio {port} RTP/AVP 0\n".encode(),
    "elsewhere": lambda port: elsewhere(_ELSEWHERE.format(port=port).encode()),
    "elsewhere-file": lambda port: elsewhere(b"file:///etc/passwd"),
    "elsewhere-alias": lambda port: elsewhere(_ELSEWHERE.format(port=port).encode(), b"alis"),
}
"""They name another file or another host, on which a port of this machine listens."""


def _part(file: bytes) -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": base64_of(file), "format": "wav"}}


files = FileAttack(
    _part, sound, HARMLESS, HARMFUL, {f"noise-{kind}": partial(noise, kind) for kind in KINDS}, ELSEWHERE
).run


def many_sounds(target: Target, num: int = 2000) -> Outcome:
    """Send one request with so many sounds."""
    return many(target, _part, sound(seconds=0.2), num)


ATTACKS = [
    Attack("sound-files", files, SETUP, max_rss=MAX_RSS_MIB),
    Attack("sound-many", many_sounds, SETUP, max_rss=MAX_RSS_MIB),
]

"""Makes files of sound."""

import io
import struct
from typing import Any

import av
import numpy as np
import numpy.typing as npt

KINDS = {
    "wav": ("wav", "pcm_s16le"),
    "wav-24-bit": ("wav", "pcm_s24le"),
    "wav-8-bit": ("wav", "pcm_u8"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "mpga": ("mp2", "mp2"),
    "mpeg": ("mpeg", "mp2"),
    "mp4": ("mp4", "aac"),
    "m4a": ("ipod", "aac"),
    "m4a-lossless": ("ipod", "alac"),
    "ogg-opus": ("ogg", "libopus"),
    "ogg-flac": ("ogg", "flac"),
    "webm": ("webm", "libopus"),
    "aac": ("adts", "aac"),
}
"""Container and codec, as FFmpeg calls them, of what clients call so."""


def encoded(
    samples: npt.NDArray[np.float32], container: str, codec: str, rate: int = 16_000, *, picture: bool = False,
    **options: str,
) -> bytes:  # fmt: skip
    """Return a file of samples [channels, n]. ``picture``: whether it is a video. ``options``: of the codec."""
    data = io.BytesIO()
    layout = {1: "mono", 2: "stereo", 6: "5.1"}[len(samples)]
    with av.open(data, "w", format=container) as file:
        video: Any = file.add_stream("mpeg4", rate=5, width=32, height=32) if picture else None
        stream: Any = file.add_stream(codec, rate=rate, layout=layout, options=options)
        for number in range(5 if picture else 0):
            pixels = np.full((32, 32, 3), 50 * number, np.uint8)
            file.mux(video.encode(av.VideoFrame.from_ndarray(pixels).reformat(format="yuv420p")))
        if picture:
            file.mux(video.encode(None))
        resampler = av.AudioResampler(stream.format, layout, rate, stream.frame_size or 1024)
        for first in range(0, samples.shape[1], rate):
            block = np.ascontiguousarray(samples[:, first : first + rate])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.sample_rate = rate
            frame.pts = first
            for each in resampler.resample(frame):
                file.mux(stream.encode(each))
        for each in resampler.resample(None):
            file.mux(stream.encode(each))
        file.mux(stream.encode(None))
    return data.getvalue()


def flac_bomb(seconds: float) -> bytes:
    """Return a FLAC file of silence, of 17 bytes for each 8.2 s."""
    rate, block = 8000, 65_535
    count = round(seconds * rate / block)
    facts = (rate << 44 | 15 << 36 | count * block).to_bytes(8)  # one channel of 16 bits
    head = b"fLaC\x80\0\0\x22" + struct.pack(">HH", block, block) + bytes(6) + facts + bytes(16)
    return head + b"".join(map(_silent_frame, range(count)))


def _silent_frame(number: int) -> bytes:
    head = b"\xff\xf8\x74\x08" + chr(number).encode("utf-8", "surrogatepass") + b"\xff\xfe"
    head += bytes([_check(head, 8, 0x07)])
    frame = head + bytes(3)  # one number for all samples
    return frame + _check(frame, 16, 0x8005).to_bytes(2)


def _check(data: bytes, bits: int, polynomial: int) -> int:
    value = 0
    for byte in data:
        value ^= byte << bits - 8
        for _ in range(8):
            value = (value << 1) ^ (polynomial if value >> bits - 1 else 0)
            value &= (1 << bits) - 1
    return value


def tone(seconds: float, rate: int = 16_000, pitch: float = 440.0) -> npt.NDArray[np.float32]:
    """Return a tone [1, n]."""
    time = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * pitch * time)).astype(np.float32)[None]

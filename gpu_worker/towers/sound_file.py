"""Reads sounds: one channel of float32 samples at the rate that a model asks for. Needs neither torch nor transformers.

The container is chosen here, by the first bytes, and nothing is left to guess to the libraries of FFmpeg: some of their
formats (playlists, lists of files) open other files and addresses. Those that are read here hold all their sound.
"""

import io
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from typing import Any, BinaryIO, NoReturn

import av
import av.error
import av.stream
import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float32]
"""[n] between -1 and 1, of one channel."""
File = BinaryIO | io.RawIOBase
SAMPLING_RATE = 16_000
MAX_SECONDS = 86_400.0
MIN_SECONDS = 0.1
SECONDS_PER_BYTE = 1 / 64
"""Of a sound that is longer than ``FREE_SECONDS``: speech has 700 bytes a second and more, and a file of 160 KB of FLAC
may hold a day of silence, which takes 5.5 GB."""
FREE_SECONDS = 600.0
_RATES = range(4_000, 768_001)
_MAX_CHANNELS = 16
_BLOCK_SAMPLES = 1 << 16
_READ_BYTES = 1 << 17
_FORMATS = ("wav", "flac", "mp3", "mp4, m4a", "mpeg, mpga", "ogg", "webm", "aac")
_NAMES = """
    aac ac3 alac amrnb amrwb eac3 flac libopencore_amrnb libopencore_amrwb libopus mp1 mp1float mp2 mp2float mp3
    mp3float opus vorbis adpcm_ima_qt adpcm_ima_wav adpcm_ms gsm gsm_ms pcm_alaw pcm_f32be pcm_f32le pcm_f64be pcm_f64le
    pcm_mulaw pcm_s16be pcm_s16le pcm_s24be pcm_s24le pcm_s32be pcm_s32le pcm_s8 pcm_u8
    """
_CODECS = frozenset(_NAMES.split())
"""Decoders that may run: none of pictures, which a video has beside its sound."""


class BadSound(ValueError):
    """A sound that is not taken; the message may be shown to clients."""


def read_sound(data: bytes, rate: int = SAMPLING_RATE, max_seconds: float = MAX_SECONDS) -> Samples:
    """Return all samples of a file at a rate, in samples a second. Raises :class:`BadSound`."""
    return np.concatenate(list(decode(io.BytesIO(data), len(data), rate, max_seconds)))


def resampled(samples: npt.ArrayLike, rate: int, new_rate: int = SAMPLING_RATE) -> Samples:
    """Return samples of a caller, [n] or [channels, n], as one channel at another rate. Raises :class:`BadSound`."""
    given = np.asarray(samples, np.float32)
    if given.ndim == 2:
        given = given.mean(0)
    if given.ndim != 1 or not given.size or not np.isfinite(given).all():
        raise BadSound("A sound must be [samples] or [channels, samples] finite numbers.")
    if rate == new_rate:
        return given
    _check_rate(rate)
    mixer = _Mixer(new_rate)
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(given[None]), format="fltp", layout="mono")
    frame.sample_rate = rate
    return np.concatenate([*mixer.blocks(frame), *mixer.rest()])


def decode(file: File, num_bytes: int, rate: int, max_seconds: float = MAX_SECONDS) -> Iterator[Samples]:
    """Yield the samples of a file, block by block; at most one block is more than ``max_seconds`` allow.

    ``num_bytes``: of the file. What cannot be decoded is left out, and a file that was cut is read as far as it goes,
    as players do. Raises :class:`BadSound` for a file without sound, one that is too short or too long, and one of
    which less than half can be decoded.
    """
    longest = min(max_seconds, max(FREE_SECONDS, num_bytes * SECONDS_PER_BYTE))
    num_samples = 0
    try:
        with open_container(file, _format(file), _CODECS) as container:
            for block in _blocks(container, rate):
                num_samples += len(block)
                if num_samples > longest * rate:
                    raise BadSound(_too_long(longest, max_seconds, num_bytes))
                yield block
    except (av.error.FFmpegError, EOFError) as error:
        if isinstance(error, MemoryError):
            raise MemoryError from None
        raise BadSound("The sound is damaged or incomplete.") from error
    if num_samples < MIN_SECONDS * rate:
        raise BadSound(f"The sound is {num_samples / rate:.3f} s long; it must have at least {MIN_SECONDS:g} s.")


def open_container(file: File, kind: str, codecs: Collection[str]) -> Any:
    """Return a file's container, of the kind that FFmpeg calls so. It opens no other file, and decodes with nothing but
    ``codecs``."""
    options = {"codec_whitelist": ",".join(sorted(codecs)), "protocol_whitelist": "none"}
    return av.open(
        file,
        "r",
        format=kind,
        metadata_errors="replace",
        io_open=_refuse,
        buffer_size=_READ_BYTES,
        container_options=options,
    )


def use_alone(container: Any, stream: Any, codecs: Collection[str]) -> str:
    """Let a container read nothing but one of its streams, in this thread. Returns the name of its decoder if that is
    none of ``codecs``; empty: it is one."""
    for other in container.streams:
        if other is not stream:
            other.discard = av.stream.Discard.all
    context = stream.codec_context
    if context is None or context.name not in codecs:
        return "unknown" if context is None else str(context.name)
    context.thread_count = 1
    return ""


def _refuse(*_: object) -> NoReturn:
    raise PermissionError("the file names another one")


def _format(file: File) -> str:
    """Return what FFmpeg calls the container of a file; leaves the file at its begin."""
    head = file.read(16) or b""
    is_tagged = head[:3] == b"ID3" and len(head) >= 10  # a title and the like, before the sound
    if is_tagged:
        size = sum((byte & 0x7F) << 7 * place for place, byte in enumerate(reversed(head[6:10])))
        file.seek(10 + size)
        head = file.read(16) or b""
    file.seek(0)
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"free", b"skip", b"wide"):
        return "mov"
    for mark, name in ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"\x1a\x45\xdf\xa3", "matroska"), (b"\0\0\1\xba", "mpeg")):
        if head.startswith(mark):
            return name
    if head[:1] == b"\xff" and len(head) > 1 and head[1] & 0xE0 == 0xE0:
        return "mp3" if head[1] & 0x06 else "aac"  # the bits of the layer, which AAC has not
    if is_tagged:
        return "mp3"  # some have padding behind their tags
    raise BadSound(f"The sound is not one of {', '.join(_FORMATS)}.")


def _blocks(container: Any, rate: int) -> Iterator[Samples]:
    if not container.streams.audio:
        raise BadSound("The file has no sound.")
    stream = container.streams.audio[0]
    if unread := use_alone(container, stream, _CODECS):
        raise BadSound(f"The sound is coded in a way that is not read ({unread}).")
    mixer, num_good, num_bad = _Mixer(rate), 0, 0
    for packet in container.demux(stream):
        try:
            frames: Sequence[Any] = packet.decode()
        except (av.error.InvalidDataError, av.error.PatchWelcomeError):
            num_bad += 1
            continue
        for frame in frames:
            num_good += 1
            yield from mixer.blocks(frame)
    yield from mixer.rest()
    if num_bad > num_good or not num_good:
        raise BadSound("The sound is damaged or incomplete.")


class _Mixer:
    """Turns frames of any kind into blocks of one channel at one rate."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._kind: tuple[str, str, int] | None = None
        self._resampler: Any = None

    def blocks(self, frame: Any) -> Iterator[Samples]:
        kind = (frame.format.name, frame.layout.name, frame.sample_rate)
        if kind != self._kind:  # at the first one, and where files were joined
            yield from self.rest()
            _check_rate(frame.sample_rate)
            if frame.layout.nb_channels > _MAX_CHANNELS:
                raise BadSound(f"The sound has {frame.layout.nb_channels} channels; at most {_MAX_CHANNELS} are read.")
            self._kind = kind
            self._resampler = av.AudioResampler("fltp", frame.layout, self._rate, frame_size=_BLOCK_SAMPLES)
        frame.pts, frame.time_base = None, Fraction(1, frame.sample_rate)
        yield from map(_mixed, self._resampler.resample(frame))

    def rest(self) -> Iterator[Samples]:
        if self._resampler is not None:
            yield from map(_mixed, self._resampler.resample(None))
            self._resampler = None


def _mixed(frame: Any) -> Samples:
    # By hand: FFmpeg adds channels of float samples without making them quieter, so that the sum exceeds 1.
    block: Samples = frame.to_ndarray().mean(0, dtype=np.float32)
    if not np.isfinite(block).all():
        raise BadSound("The sound has samples that are not finite numbers.")
    return block


def _check_rate(rate: int) -> None:
    if rate not in _RATES:
        raise BadSound(f"The sound has {rate} samples a second; {_RATES.start} to {_RATES.stop - 1} are read.")


def _too_long(longest: float, max_seconds: float, num_bytes: int) -> str:
    if longest >= max_seconds:
        return f"The sound is longer than {max_seconds:g} s."
    return f"The file of {num_bytes:,} bytes holds more than {longest:.0f} s, which no sound of that size has."

"""Which sounds are read, what becomes of them, and what is refused."""

import io
import re
import struct
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest

from tests.gpu_worker.towers.sound_files import KINDS, encoded, flac_bomb, tone
from tokenloom.gpu_worker.towers.sound_file import BadSound, decode, read_sound, resampled


def pitch_of(samples: npt.NDArray[np.float32]) -> float:
    """Return the loudest frequency of the middle of a sound, in Hz."""
    middle = samples[len(samples) // 4 : len(samples) * 3 // 4]
    return float(np.abs(np.fft.rfft(middle * np.hanning(len(middle)))).argmax() * 16_000 / len(middle))


def wav(data: bytes, rate: int = 16_000, channels: int = 1, bits: int = 16) -> bytes:
    head = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * channels * bits // 8, channels * bits // 8, bits)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_read(kind: str) -> None:
    container, codec = KINDS[kind]
    rate = 48_000 if "opus" in codec else 44_100
    samples = read_sound(encoded(tone(2.0, rate), container, codec, rate))
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(32_000, abs=900)  # some codecs have whole frames only
    assert pitch_of(samples) == pytest.approx(440, abs=2)
    assert np.abs(samples[8000:-8000]).max() == pytest.approx(0.4, abs=0.02)


def test_what_needs_no_change_is_not_changed() -> None:
    samples = np.random.default_rng(0).uniform(-1, 1, (1, 20_000)).astype(np.float32)
    assert np.array_equal(read_sound(encoded(samples, "wav", "pcm_f32le")), samples[0])
    deep = read_sound(encoded(samples, "wav", "pcm_s24le"))
    assert np.abs(deep - samples[0]).max() < 2**-22


@pytest.mark.parametrize("rate", [8000, 22_050, 96_000])
def test_another_rate_keeps_the_pitch(rate: int) -> None:
    samples = read_sound(encoded(tone(1.0, rate), "wav", "pcm_s16le", rate))
    assert len(samples) == pytest.approx(16_000, abs=2)
    assert pitch_of(samples) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("channels", [2, 6])
def test_channels_are_averaged(channels: int) -> None:
    samples = np.zeros((channels, 16_000), np.float32)
    samples[0] = tone(1.0)
    mixed = read_sound(encoded(samples, "wav", "pcm_f32le"))
    assert np.abs(mixed - samples[0] / channels).max() < 1e-6


def test_channels_without_names_are_averaged() -> None:
    values = np.zeros((8000, 3), "<i2")
    values[:, 1] = 3000
    assert read_sound(wav(values.tobytes(), channels=3)) == pytest.approx(1000 / 32768, abs=1e-6)


def test_a_variable_bit_rate_is_read_whole() -> None:
    quiet, loud = np.zeros((1, 88_200), np.float32), tone(2.0, 44_100)
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, (1, 88_200)).astype(np.float32)
    file = encoded(np.concatenate((quiet, loud, noise), 1), "mp3", "libmp3lame", 44_100, qscale="4")
    assert len(read_sound(file)) == pytest.approx(96_000, abs=900)


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_the_sound_of_a_video_is_read(container: str) -> None:
    file = encoded(tone(1.0, 44_100), container, "aac", 44_100, picture=True)
    assert pitch_of(read_sound(file)) == pytest.approx(440, abs=2)


def test_a_video_without_sound_is_refused() -> None:
    data = io.BytesIO()
    with av.open(data, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8)).reformat(format="yuv420p")
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with pytest.raises(BadSound, match="has no sound"):
        read_sound(data.getvalue())


@pytest.mark.parametrize("kind", ["wav", "mp3", "ogg-opus", "webm", "aac", "flac"])
def test_a_file_that_was_cut_is_read_as_far_as_it_goes(kind: str) -> None:
    container, codec = KINDS[kind]
    rate = 48_000 if "opus" in codec else 44_100
    file = encoded(tone(6.0, rate), container, codec, rate)
    samples = read_sound(file[: len(file) // 2])
    assert 30_000 < len(samples) < 60_000
    assert pitch_of(samples) == pytest.approx(440, abs=2)


@pytest.mark.parametrize("kind", ["mp4", "m4a"])
def test_a_file_that_lost_its_index_is_refused(kind: str) -> None:
    file = encoded(tone(2.0, 44_100), *KINDS[kind], 44_100)
    with pytest.raises(BadSound, match="damaged or incomplete"):
        read_sound(file[: len(file) * 2 // 3])


@pytest.mark.parametrize("kind", KINDS)
def test_noise_in_a_container_is_refused_or_read_as_sound(kind: str) -> None:
    container, codec = KINDS[kind]
    rate = 48_000 if "opus" in codec else 44_100
    file = bytearray(encoded(tone(2.0, rate), container, codec, rate))
    random = np.random.default_rng(0)
    for first in (12, 100, len(file) // 2):
        file[first:] = random.bytes(len(file) - first)
        try:
            samples = read_sound(bytes(file))
        except BadSound:
            continue
        assert np.isfinite(samples).all()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 99,
        b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile '/etc/passwd'\n",
        b"<MPD><BaseURL>file:///etc/passwd</BaseURL></MPD>",
        b"v=0\nm=audio 5004 RTP/AVP 0\nc=IN IP4 127.0.0.1\n",
        b"RIFF\x10\x00\x00\x00AVI LIST",
        b"FORM\0\0\0\x04AIFF",
        b"\x89PNG\r\n\x1a\n",
    ],
)
def test_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(BadSound, match="is not one of wav, flac, mp3"):
        read_sound(data)


def test_a_mark_before_another_format_does_not_open_it() -> None:
    playlist = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    for mark in (b"ID3\x04\0\0\0\0\0\0", b"\xff\xfb\x90\0", b"RIFF\xff\xff\xff\xffWAVE", b"OggS", b"\0\0\0\x08ftyp"):
        with pytest.raises(BadSound):
            read_sound(mark + playlist)


def test_what_follows_a_sound_is_not_looked_at() -> None:
    file = encoded(tone(1.0), "wav", "pcm_s16le")
    assert len(read_sound(file + b"PK\x03\x04" + bytes(4096))) == pytest.approx(16_000, abs=2100)


def test_a_small_file_does_not_hold_a_day() -> None:
    assert len(read_sound(flac_bomb(100))) == pytest.approx(1_600_000, abs=80_000)
    silence = flac_bomb(86_000)
    assert len(silence) < 200_000
    with pytest.raises(BadSound, match=re.escape(f"The file of {len(silence):,} bytes holds more than")):
        read_sound(silence)


def test_limits_are_named() -> None:
    with pytest.raises(BadSound, match="longer than 1 s"):
        read_sound(wav(bytes(40_000)), max_seconds=1.0)
    with pytest.raises(BadSound, match=r"at least 0\.1 s"):
        read_sound(wav(bytes(2000)))
    with pytest.raises(BadSound, match="12 samples a second"):
        read_sound(wav(bytes(4000), rate=12))
    loud = struct.pack("<4000f", *[float("nan")] * 4000)
    head = struct.pack("<IHHIIHH", 16, 3, 1, 16_000, 64_000, 4, 32)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(loud)) + loud
    with pytest.raises(BadSound, match="not finite"):
        read_sound(b"RIFF" + struct.pack("<I", len(body)) + body)


def test_a_long_sound_comes_in_blocks() -> None:
    file = wav(bytes(32_000 * 60))
    blocks = [len(block) for block in decode(io.BytesIO(file), len(file), 16_000)]
    assert sum(blocks) == 960_000
    assert max(blocks) <= 1 << 16


def test_samples_of_callers_are_resampled() -> None:
    stereo = np.concatenate([tone(1.0, 48_000), np.zeros((1, 48_000), np.float32)])
    mixed = resampled(stereo, 48_000)
    assert len(mixed) == pytest.approx(16_000, abs=2)
    assert pitch_of(mixed) == pytest.approx(440, abs=2)
    assert np.array_equal(resampled([0.5, 0.25], 16_000), np.array([0.5, 0.25], np.float32))
    for wrong in ([], [[[1.0]]], [float("nan")]):
        with pytest.raises(BadSound):
            resampled(wrong, 16_000)


def test_files_are_read_without_torch_and_transformers(tmp_path: Path) -> None:
    (tmp_path / "a.mp3").write_bytes(encoded(tone(1.0, 44_100), "mp3", "libmp3lame", 44_100))
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from pathlib import Path\n"
        "from tokenloom.gpu_worker.towers.sound_file import read_sound\n"
        f"print(len(read_sound(Path({str(tmp_path / 'a.mp3')!r}).read_bytes())))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) == pytest.approx(16_000, abs=900)

"""Features are those of transformers' extractor, also of the pieces of a long sound, and are made without torch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import transformers

from tests.checkpoints.whole_sound import RATE, sound, write_whole_sound
from tokenloom.gpu_worker.towers.sound_file import BadSound
from tokenloom.gpu_worker.towers.sound_processor import PeakMeter, Piece, SoundProcessor

FRAMES = 3000
PIECE = 480_000


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole_sound("qwen2_audio", tmp_path_factory.mktemp("sound"))


def processor_of(path: Path, *, sees_whole: bool) -> SoundProcessor:
    processor = SoundProcessor(path)
    processor.sees_whole = sees_whole
    return processor


def expected(path: Path, samples: npt.NDArray[np.float32], **options: Any) -> npt.NDArray[np.float32]:
    load: Any = transformers.WhisperFeatureExtractor.from_pretrained
    extractor = load(path)
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    features: npt.NDArray[np.float32] = extractor(samples, sampling_rate=RATE, return_tensors="np", **options)[
        "input_features"
    ][0]
    return features


@pytest.mark.parametrize("sees_whole", [True, False])
@pytest.mark.parametrize("num", [1600, 16_037, 479_900, 480_000])
def test_a_short_sound_is_prepared_as_by_transformers(path: Path, num: int, sees_whole: bool) -> None:
    samples = sound(30.0)[:num]
    made = processor_of(path, sees_whole=sees_whole).features(samples)
    assert np.array_equal(made["input_features"][0], expected(path, samples))
    assert made["num_frames"].tolist() == [-(-num // 160)]


@pytest.mark.parametrize("num", [480_001, 613_777, 192_005, 479_950])
def test_a_piece_is_a_slice_of_the_whole(path: Path, num: int) -> None:
    samples = sound(num / RATE + 0.1)[:num] * np.linspace(0.01, 1, num, dtype=np.float32)
    processor = processor_of(path, sees_whole=True)
    long = {"padding": "longest", "truncation": False} if num > PIECE else {}
    whole = expected(path, samples, **long)
    meter = PeakMeter(processor)
    for first in range(0, num, 65_536):
        meter.add(samples[first : first + 65_536])
    peak = meter.peak()
    assert np.float32(peak) == whole.max() * 4 - 4 or peak == pytest.approx(whole.max() * 4 - 4, abs=1e-6)
    for start in (0, 160 * 77, 160 * 1100, num // 160 * 160 - 320):
        piece = Piece(start, min(num - start, PIECE), num, peak)
        first, last = processor.window(piece)
        made = processor.features(samples[first:last], piece)["input_features"][0]
        part = whole[:, start // 160 : start // 160 + FRAMES]
        assert np.array_equal(made[:, : part.shape[1]], part)
        assert not made[:, part.shape[1] :].any()


def test_a_piece_that_ends_before_its_sound_is_silent_behind(path: Path) -> None:
    samples, processor = sound(20.0), processor_of(path, sees_whole=True)
    piece = Piece(16_000, 32_000, len(samples), 1.0)
    first, last = processor.window(piece)
    made = processor.features(samples[first:last], piece)["input_features"][0]
    assert made[:, :200].any(axis=0).all()
    assert not made[:, 200:].any()


def test_a_piece_by_itself_is_a_sound_of_its_own(path: Path) -> None:
    samples, processor = sound(3.0), processor_of(path, sees_whole=False)
    piece = Piece(16_001, 20_000, len(samples), 1.0)
    assert processor.window(piece) == (16_001, 36_001)
    made = processor.features(samples[16_001:36_001], piece)["input_features"][0]
    assert np.array_equal(made, expected(path, samples[16_001:36_001]))


@pytest.mark.parametrize(
    "piece",
    [Piece(0, 0, 100), Piece(0, 480_001, 500_000), Piece(50, 60, 100), Piece(-160, 320, 1000), Piece(1, 320, 999)],
)
def test_a_piece_that_is_none_is_refused(path: Path, piece: Piece) -> None:
    with pytest.raises(BadSound):
        processor_of(path, sees_whole=True).features(np.zeros(piece.total, np.float32), piece)


def test_settings_that_are_not_known_are_refused(path: Path, tmp_path: Path) -> None:
    settings = (path / "preprocessor_config.json").read_text()
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    for changed in (settings.replace("Whisper", "Other"), settings.replace('"n_fft"', '"dither": 0.1, "n_fft"')):
        (tmp_path / "preprocessor_config.json").write_text(changed)
        with pytest.raises(ValueError, match="sounds are prepared"):
            SoundProcessor(tmp_path)


def test_silence_has_a_peak(path: Path) -> None:
    meter = PeakMeter(SoundProcessor(path))
    meter.add(np.zeros(100, np.float32))
    assert meter.peak() == -10.0


def test_features_are_made_without_torch(path: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['torchvision'] = None\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from tokenloom.gpu_worker.towers.sound_processor import SoundProcessor\n"
        f"made = SoundProcessor(Path({str(path)!r})).features(np.ones(16000, np.float32))\n"
        "print(float(made['input_features'].sum()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    made = SoundProcessor(path).features(np.ones(16_000, np.float32))["input_features"]
    assert float(done.stdout) == float(made.sum())

"""A tower alone computes the rows that the whole model of transformers computes."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints.whole_sound import RATE, WRITERS, sound, write_whole_sound
from tests.gpu_worker.towers.sound_files import encoded
from tokenloom.gpu_worker.towers.sound_file import decode
from tokenloom.gpu_worker.towers.sound_processor import SoundProcessor
from tokenloom.gpu_worker.towers.sound_tower import SoundTower
from tokenloom.model_files.checkpoint import reads_sounds


def whisper_rows(path: Path, samples: Any) -> Any:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
    features = SoundProcessor(path).features(samples)["input_features"]
    return model.model.encoder(torch.from_numpy(features)).last_hidden_state[0].numpy()


def qwen2_audio_rows(path: Path, samples: Any) -> Any:
    load: Any = transformers.Qwen2AudioForConditionalGeneration.from_pretrained  # with the attention that the tower has
    model, rows = load(path, dtype=torch.float32).eval(), []
    extractor = transformers.AutoFeatureExtractor.from_pretrained(path)
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    processor = transformers.Qwen2AudioProcessor(extractor, transformers.AutoTokenizer.from_pretrained(path))
    inputs = processor(text="<|AUDIO|>", audio=[samples], sampling_rate=RATE, return_tensors="pt")
    model.model.multi_modal_projector.register_forward_hook(lambda *call: rows.append(call[-1]))
    model(**inputs)
    return rows[0][0, : int((inputs["input_ids"] == model.config.audio_token_id).sum())].numpy()


EXPECTED = {"whisper": whisper_rows, "qwen2_audio": qwen2_audio_rows}


@pytest.mark.parametrize("kind", sorted(EXPECTED.keys() & WRITERS.keys()))
@torch.inference_mode()
def test_rows_are_those_of_the_whole_model(kind: str, tmp_path: Path) -> None:
    path = write_whole_sound(kind, tmp_path)
    assert reads_sounds(path)
    processor, tower = SoundProcessor(path), SoundTower(path)
    pieces, alone = [], []
    for seconds in (0.73, 4.0, 30.0):
        samples = sound(seconds, int(seconds))
        pieces.append(processor.features(samples))
        alone.append(tower.rows(pieces[-1]))
        assert alone[-1].shape[1] == tower.width
        assert np.array_equal(alone[-1], EXPECTED[kind](path, samples))
    assert np.abs(alone[0][:5] - alone[1][:5]).max() > 1e-3
    for together, each in zip(tower.rows_of(pieces), alone, strict=True):
        assert np.abs(together - each).max() < 1e-4
    assert not [name for name, _ in tower._body.named_parameters() if name.startswith(("decoder", "language_model"))]


@pytest.mark.parametrize("kind", sorted(WRITERS))
@pytest.mark.parametrize(("quantization", "likeness"), [("int8-dynamic", 0.999), ("int4", 0.93)])
def test_rounded_towers_compute_nearly_the_rows(kind: str, quantization: str, likeness: float, tmp_path: Path) -> None:
    path = write_whole_sound(kind, tmp_path)
    features = SoundProcessor(path).features(sound(2.0))
    rows, rounded = SoundTower(path).rows(features), SoundTower(path, quantization=quantization).rows(features)
    assert not np.array_equal(rows, rounded)
    lengths = np.linalg.norm(rows, axis=1) * np.linalg.norm(rounded, axis=1)
    assert np.median((rows * rounded).sum(1) / lengths) > likeness


def test_a_checkpoint_without_a_tower_of_sounds_is_refused(tmp_path: Path) -> None:
    path = write_whole_sound("qwen2_audio", tmp_path)
    config = (path / "config.json").read_text()
    (path / "config.json").write_text(config.replace('"model_type": "qwen2_audio"', '"model_type": "qwen2"'))
    assert not reads_sounds(path)
    with pytest.raises(ValueError, match="no tower of sounds"):
        SoundTower(path)


def test_a_file_becomes_rows(tmp_path: Path) -> None:
    path = write_whole_sound("qwen2_audio", tmp_path)
    file = encoded(sound(2.0)[None], "wav", "pcm_f32le")
    processor, tower = SoundProcessor(path), SoundTower(path)
    (samples,) = decode(io.BytesIO(file), len(file), processor.sampling_rate)
    assert np.array_equal(tower.rows(processor.features(samples)), tower.rows(processor.features(sound(2.0))))

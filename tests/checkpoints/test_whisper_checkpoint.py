from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.checkpoints.whisper_checkpoint import RATE, WHISPER_VOCAB_SIZE, whisper_id
from tests.checkpoints.whole_sound import sound, write_whole_sound


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole_sound("whisper", tmp_path_factory.mktemp("sound"))


def test_special_tokens_have_the_ids_that_the_files_name(path: Path) -> None:
    processor: Any = transformers.WhisperProcessor.from_pretrained(path)
    tokenizer = processor.tokenizer
    names = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|su|>", "<|notimestamps|>", "<|0.00|>", "<|30.00|>"]
    assert len(tokenizer) == WHISPER_VOCAB_SIZE
    assert tokenizer.convert_tokens_to_ids(names) == [whisper_id(name) for name in names]
    tokenizer.set_prefix_tokens(language="de", task="translate", predict_timestamps=True)
    prefix = [whisper_id(name) for name in ("<|startoftranscript|>", "<|de|>", "<|translate|>")]
    assert tokenizer("Ä", add_special_tokens=True).input_ids[:3] == prefix


@pytest.mark.parametrize("timestamps", [False, True])
def test_tokens_change_with_the_sound(path: Path, timestamps: bool) -> None:
    model, report = transformers.WhisperForConditionalGeneration.from_pretrained(path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(path)
    sounds = [extractor(sound(5.0, seed), sampling_rate=RATE)["input_features"] for seed in range(3)]
    features = torch.from_numpy(np.concatenate(sounds))
    made: Any = model.eval().generate(
        features, language="en", task="transcribe", return_timestamps=timestamps, max_new_tokens=40, do_sample=False
    )
    texts = made.tolist()
    assert len({tuple(text) for text in texts}) == 3, texts
    assert all(len(set(text)) > 8 for text in texts), texts
    times = [token for text in texts for token in text if token >= whisper_id("<|0.00|>")]
    assert len(set(times)) >= 6 if timestamps else not times, texts

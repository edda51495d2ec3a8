"""The prompts of sounds are those of OpenAI's reference, token for token."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tokenloom.request.errors import InvalidArgument
from tokenloom.services.tokenizer.media.transcript_prompts import NAMES, TranscriptPrompts
from tokenloom.v1.tokenizer_pb2 import (
    TRANSCRIPT_TASK_TRANSCRIBE,
    TRANSCRIPT_TASK_TRANSLATE,
    EncodeTranscriptRequest,
    MediaSize,
)
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO

LANGUAGES = ("en", "de", "haw")
TOKENS = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES)),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
    *(f"<|{index / 50:.2f}|>" for index in range(1501)),
)
SOUND = MediaSize(kind=MEDIA_KIND_AUDIO, samples=1_000_000, digest=b"d" * 32, encoder="unix:/encoder")


def make_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in TOKENS])
    return made


TOKENIZER = make_tokenizer()


def make(path: Path, *, model_type: str = "whisper", **generation: Any) -> TranscriptPrompts | None:
    config = {"model_type": model_type, "max_source_positions": 1500, "max_target_positions": 448, "vocab_size": 51865}
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 16000}))
    (path / "generation_config.json").write_text(json.dumps({"is_multilingual": True} | generation))
    return TranscriptPrompts.of_checkpoint(path, TOKENIZER)


@pytest.fixture
def prompts(tmp_path: Path) -> TranscriptPrompts:
    made = make(tmp_path, suppress_tokens=[1, 2], begin_suppress_tokens=[220, 256])
    assert made is not None
    return made


def request(**fields: Any) -> EncodeTranscriptRequest:
    values: dict[str, Any] = {"sound": SOUND, "samples": 480_000, "task": TRANSCRIPT_TASK_TRANSCRIBE, "language": "de"}
    return EncodeTranscriptRequest(**(values | fields))


def spelled(ids: Any) -> str:
    text: str = TOKENIZER.decode(list(ids), skip_special_tokens=False)
    return text


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<|startoftranscript|><|de|><|transcribe|><|notimestamps|>"),
        ({"with_timestamps": True}, "<|startoftranscript|><|de|><|transcribe|>"),
        (
            {"task": TRANSCRIPT_TASK_TRANSLATE, "language": "haw", "with_timestamps": True},
            "<|startoftranscript|><|haw|><|translate|>",
        ),
        ({"task": 0, "language": ""}, "<|startoftranscript|>"),
        (
            {"previous_text": "  Names: Ünal ", "with_timestamps": True},
            "<|startofprev|> Names: Ünal<|startoftranscript|><|de|><|transcribe|>",
        ),
        ({"task": 0, "previous_text": "a"}, "<|startofprev|> a<|startoftranscript|>"),
    ],
)
def test_prompts(prompts: TranscriptPrompts, fields: dict[str, Any], text: str) -> None:
    assert spelled(prompts.encode(request(**fields)).token_ids) == text


def test_the_last_tokens_of_the_text_before_take_half_of_the_context(prompts: TranscriptPrompts) -> None:
    ids = prompts.encode(request(previous_text="ab" * 200 + "z")).token_ids
    assert len(ids) == 1 + 223 + 4
    assert spelled(ids[1:224]) == ("ab" * 200 + "z")[-223:]


def test_an_item_stands_for_no_token(prompts: TranscriptPrompts) -> None:
    (item,) = prompts.encode(request(start=160, samples=320)).media
    assert (item.num_rows, item.levels, len(item.runs), item.kind) == (1500, 1, 0, MEDIA_KIND_AUDIO)
    assert item.options_json == b'{"samples":320,"start":160}'
    assert (item.digest, item.encoder) == (SOUND.digest, SOUND.encoder)


def test_keys_say_which_rows_they_are(prompts: TranscriptPrompts) -> None:
    changes: list[dict[str, Any]] = [{}, {"start": 160}, {"samples": 160}, {"cache_salt": b"other"}]
    changes.append({"sound": MediaSize(samples=1_000_000, digest=b"e" * 32)})
    assert len({prompts.encode(request(**each)).media[0].key for each in changes}) == len(changes)
    assert prompts.encode(request()).media[0].key == prompts.encode(request(language="en")).media[0].key


def test_traits(prompts: TranscriptPrompts) -> None:
    traits = prompts.traits
    assert (traits.sampling_rate, traits.piece_samples, traits.frame_samples) == (16_000, 480_000, 160)
    assert traits.timestamp_samples == 320
    assert [(each.code, each.names[0]) for each in traits.languages] == [
        ("en", "english"),
        ("de", "german"),
        ("haw", "hawaiian"),
    ]
    assert spelled([traits.first_timestamp_id]) == "<|0.00|>"
    assert spelled([traits.no_speech_id, traits.no_timestamps_id]) == "<|nospeech|><|notimestamps|>"
    assert (list(traits.suppressed_ids), list(traits.begin_suppressed_ids)) == ([1, 2], [220, 256])
    assert (traits.first_special_id, traits.max_initial_timestamp) == (256, 50)


def test_names_are_those_of_transformers() -> None:
    whisper = pytest.importorskip("transformers.models.whisper.tokenization_whisper")
    ours = {name: code for code, names in NAMES.items() for name in names}
    assert ours == whisper.TO_LANGUAGE_CODE
    assert {code: names[0] for code, names in NAMES.items()} == whisper.LANGUAGES


def test_english_only_models_name_no_language(tmp_path: Path) -> None:
    prompts = make(tmp_path, is_multilingual=False)
    assert prompts is not None
    assert not prompts.traits.languages
    assert spelled(prompts.encode(request(language="")).token_ids) == "<|startoftranscript|><|notimestamps|>"
    for fields in ({"language": "de"}, {"language": "", "task": TRANSCRIPT_TASK_TRANSLATE}):
        with pytest.raises(InvalidArgument, match="knows English only"):
            prompts.encode(request(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"language": "xx"}, "language 'xx' is not one of the model's"),
        ({"previous_text": "a<|notimestamps|>"}, "prompt spells the special token"),
        ({"samples": 0}, "not within the sound"),
        ({"samples": 480_001}, "not within the sound"),
        ({"start": 999_999, "samples": 2}, "not within the sound"),
    ],
)
def test_refusals(prompts: TranscriptPrompts, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        prompts.encode(request(**fields))


def test_other_models_do_not_transcribe(tmp_path: Path) -> None:
    assert make(tmp_path, model_type="llava") is None

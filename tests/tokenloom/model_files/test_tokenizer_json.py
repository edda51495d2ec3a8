"""A checkpoint with vocab.json and merges.txt alone has the tokenizer that transformers makes of them."""

import json
from pathlib import Path

import pytest

from tokenloom.model_files.checkpoint import CheckpointInfo, load_tokenizer, tokenizer_file, tokenizer_fingerprint
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.model_files.tokenizer_json import VOCABULARY_FILES
from tokenloom.request.errors import InvalidArgument, NotFound

TEXTS = ["Hello world", " The cat's dog, 123 times!\n\n  naïve 你好", "", "</s>It ends here.</s>"]
OPT = {
    "tokenizer_class": "GPT2Tokenizer",
    "add_bos_token": True,
    "add_prefix_space": False,
    "bos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "eos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "unk_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "pad_token": {"__type": "AddedToken", "content": "<pad>", "normalized": True},
}
"""As facebook/opt-125m has it."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Write the demo model's vocabulary, with OPT's special tokens first."""
    model = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]
    tokens = ["<s>", "<pad>", "</s>", *(token for token in model["vocab"] if token not in ("<s>", "<pad>", "</s>"))]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(OPT))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "opt", "eos_token_id": 2}))
    return tmp_path


def test_ids_and_texts(checkpoint: Path) -> None:
    tokenizer = load_tokenizer(checkpoint)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids[0] == 2, "OPT begins each text with its end-of-sequence token"
        assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    assert "</s>" not in tokenizer.decode(tokenizer.encode(TEXTS[3]).ids)


def test_ids_are_those_of_transformers(checkpoint: Path) -> None:
    from transformers import GPT2Tokenizer

    expected = GPT2Tokenizer.from_pretrained(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected.encode(text, add_special_tokens=False)


def test_what_else_is_read(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert CheckpointInfo.load(checkpoint).eos_token_ids == (2,)
    saved = tokenizer_file(checkpoint)
    assert saved is not None
    assert saved.is_relative_to(tmp_path / "cache" / "tokenloom")
    assert saved.read_text() == load_tokenizer(checkpoint).to_str()
    before = tokenizer_fingerprint(checkpoint)
    (checkpoint / "merges.txt").write_text("#version: 0.2\n")
    assert tokenizer_fingerprint(checkpoint) != before


@pytest.mark.parametrize("missing", VOCABULARY_FILES)
def test_a_missing_file(checkpoint: Path, missing: str) -> None:
    (checkpoint / missing).unlink()
    with pytest.raises(NotFound, match=r"no tokenizer\.json"):
        load_tokenizer(checkpoint)
    assert tokenizer_file(checkpoint) is None


def test_another_class_needs_its_tokenizer_json(checkpoint: Path) -> None:
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({**OPT, "tokenizer_class": "RobertaTokenizer"}))
    with pytest.raises(NotFound, match=r"no tokenizer\.json"):
        load_tokenizer(checkpoint)


def test_a_broken_file(checkpoint: Path) -> None:
    (checkpoint / "vocab.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"vocab\.json and merges\.txt cannot be read"):
        load_tokenizer(checkpoint)

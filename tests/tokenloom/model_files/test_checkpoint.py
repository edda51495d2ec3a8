"""Checkpoint files: names, end tokens, defaults, templates and fingerprints."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tokenloom.model_files import checkpoint, model_path
from tokenloom.model_files.checkpoint import CheckpointInfo
from tokenloom.request.errors import InvalidArgument, NotFound
from tokenloom.v1.types_pb2 import SamplingParams


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the demo model's small files, to be changed."""
    path = tmp_path / "my-model"
    path.mkdir()
    for file in model_path.DEMO_MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path)
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def change(path: Path, **values: object) -> None:
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in {**config, **values}.items() if value is not None}))


def test_resolve(model: Path) -> None:
    assert model_path.resolve("tokenloom-demo") == model_path.DEMO_MODEL.resolve()
    assert model_path.resolve("tokenloom-picture") == (model_path.DEMO_MODEL / "picture").resolve()
    assert model_path.resolve(str(model)) == model.resolve()


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere", "no-such/model", "a/b/c", ""])
def test_resolve_names_what_it_did_not_find(name: str) -> None:
    with pytest.raises(NotFound) as caught:
        model_path.resolve(name)
    assert repr(name) in caught.value.message


def test_a_directory_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        model_path.resolve(str(tmp_path))


def test_a_gguf_file_is_a_checkpoint(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.Q4_0.gguf"
    file.write_bytes(b"GGUF")
    assert model_path.resolve(str(file)) == file.resolve()
    assert model_path.served_name(file, str(file)) == "small.Q4_0"
    assert len(checkpoint.weights_fingerprint(file, tmp_path / "cache")) == 32
    with pytest.raises(NotFound, match=r"config\.json; name one of its GGUF files: small\.Q4_0\.gguf"):
        model_path.resolve(str(tmp_path))
    with pytest.raises(NotFound, match=r"no such directory or \.gguf file"):
        model_path.resolve("none.gguf")
    with pytest.raises(InvalidArgument, match=r"small\.Q4_0\.gguf is not a valid GGUF file"):
        CheckpointInfo.load(file)


def test_a_gguf_file_of_a_cache_keeps_its_name(tmp_path: Path) -> None:
    """The hub's cache holds links, named as the files of the repository, to blobs that are named by their content."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0f3a").write_bytes(b"GGUF")
    link = tmp_path / "small-00001-of-00002.gguf"
    link.symlink_to(tmp_path / "blobs" / "0f3a")
    assert model_path.resolve(str(link)) == link
    assert model_path.served_name(link, str(link)) == "small"
    (tmp_path / "small-00002-of-00002.gguf").write_bytes(b"GGUF")
    first = checkpoint.weights_fingerprint(link, tmp_path / "cache")
    (tmp_path / "small-00002-of-00002.gguf").write_bytes(b"other")
    assert checkpoint.weights_fingerprint(link, tmp_path / "cache") != first
    with pytest.raises(NotFound, match=r"name one of its GGUF files: small-00001-of-00002\.gguf$"):
        model_path.resolve(str(tmp_path))


def test_served_names(model: Path) -> None:
    assert model_path.served_name(model_path.DEMO_MODEL) == "tokenloom-demo"
    assert model_path.served_name(model_path.DEMO_MODEL / "picture") == "tokenloom-picture"
    assert model_path.served_name(model) == "my-model"
    assert model_path.served_name(model, str(model)) == "my-model"
    assert model_path.served_name(Path("/cache/snapshots/abc"), "org/name") == "org/name"


def test_the_demo_model() -> None:
    info = CheckpointInfo.load(model_path.DEMO_MODEL)
    tokenizer = checkpoint.load_tokenizer(model_path.DEMO_MODEL)
    assert tokenizer.token_to_id(info.special_tokens["eos_token"]) in info.eos_token_ids
    assert info.chat_template == (model_path.DEMO_MODEL / "chat_template.jinja").read_text()


def test_end_tokens_of_generation_config_win(model: Path) -> None:
    """As in transformers, whose ``generate`` stops at no others."""
    change(model / "config.json", eos_token_id=7)
    change(model / "generation_config.json", eos_token_id=[9, 8])
    assert GenerationConfig.from_pretrained(model).eos_token_id == [9, 8]
    assert CheckpointInfo.load(model).eos_token_ids == (8, 9)
    change(model / "generation_config.json", eos_token_id=5)
    assert CheckpointInfo.load(model).eos_token_ids == (5,)


def test_the_end_may_stand_with_the_entries_of_the_text(model: Path) -> None:
    change(model / "config.json", eos_token_id=None, text_config={"eos_token_id": 7})
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        change(model / name, eos_token=None)
    (model / "generation_config.json").unlink()
    assert CheckpointInfo.load(model).eos_token_ids == (7,)
    change(model / "config.json", eos_token_id=8)
    assert CheckpointInfo.load(model).eos_token_ids == (8,)


def test_without_end_tokens_in_generation_config_the_others_count(model: Path) -> None:
    change(model / "config.json", eos_token_id=7)
    change(model / "generation_config.json", eos_token_id=None)
    change(model / "tokenizer_config.json", eos_token=None)
    change(model / "special_tokens_map.json", eos_token={"content": "<|im_end|>"})
    end = checkpoint.load_tokenizer(model).token_to_id("<|im_end|>")
    assert CheckpointInfo.load(model).eos_token_ids == tuple(sorted({7, end}))
    (model / "generation_config.json").unlink()
    assert CheckpointInfo.load(model).eos_token_ids == tuple(sorted({7, end}))


def test_sampling_defaults(model: Path) -> None:
    change(model / "generation_config.json", temperature=0.5, top_k=20, top_p=None, max_new_tokens=64, do_sample=True)
    assert CheckpointInfo.load(model).default_sampling_params == SamplingParams(
        temperature=0.5, top_k=20, max_tokens=64
    )


@pytest.mark.parametrize(
    "template", ["T", [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "T"}]]
)
def test_templates_in_the_tokenizers_config(model: Path, template: object) -> None:
    (model / "chat_template.jinja").unlink()
    assert CheckpointInfo.load(model).chat_template == ""
    change(model / "tokenizer_config.json", chat_template=template)
    assert CheckpointInfo.load(model).chat_template == "T"


def test_broken_files_are_named(model: Path) -> None:
    (model / "generation_config.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"generation_config\.json"):
        CheckpointInfo.load(model)
    (model / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json"):
        checkpoint.load_tokenizer(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        checkpoint.load_tokenizer(model)


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 5}, {"temperature": float("nan")}])
def test_wrong_sampling_defaults_are_named(model: Path, values: dict[str, object]) -> None:
    change(model / "generation_config.json", **values)
    with pytest.raises(InvalidArgument, match=rf"generation_config\.json: {next(iter(values))}"):
        CheckpointInfo.load(model)


@pytest.mark.parametrize("value", ["x", -1, [1, "x"], True])
def test_wrong_end_tokens_are_named(model: Path, value: object) -> None:
    change(model / "config.json", eos_token_id=value)
    with pytest.raises(InvalidArgument, match=r"config\.json: eos_token_id"):
        CheckpointInfo.load(model)


NEW_TEXTS = ["a <tool> b", "<|extra|>hi", "x <TOOL>", "the<|extra|> <tool>", "<|im_end|> <tool>"]


def add_to_tokenizer_config(model: Path, ids: range) -> None:
    flags = {"lstrip": False, "normalized": True, "rstrip": True, "single_word": False, "special": False}
    special = {"lstrip": True, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    entries = {ids[1]: {"content": "<|extra|>", **special}, ids[0]: {"content": "<tool>", **flags}}
    change(model / "tokenizer_config.json", added_tokens_decoder=entries)


def add_in_a_file(model: Path, ids: range) -> None:
    (model / "added_tokens.json").write_text(json.dumps({"<|extra|>": ids[1], "<tool>": ids[0]}))
    change(model / "special_tokens_map.json", pad_token="<|extra|>")
    # Newer than a special_tokens_map.json, and without what it says, would win.
    change(model / "tokenizer_config.json", added_tokens_decoder=None, pad_token=None)


@pytest.mark.parametrize("add", [add_to_tokenizer_config, add_in_a_file])
def test_added_tokens_are_those_of_transformers(model: Path, add: Callable[[Path, range], None]) -> None:
    before = checkpoint.load_tokenizer(model)
    size = before.get_vocab_size(with_added_tokens=True)
    add(model, range(size, size + 2))
    tokenizer, reference = checkpoint.load_tokenizer(model), PreTrainedTokenizerFast.from_pretrained(model)
    assert (tokenizer.token_to_id("<tool>"), tokenizer.token_to_id("<|extra|>")) == (size, size + 1)
    for text in NEW_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == reference.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.encode(NEW_TEXTS[0]).ids != before.encode(NEW_TEXTS[0]).ids


def test_a_token_of_the_vocabulary_may_be_added_as_special(model: Path) -> None:
    tokenizer = checkpoint.load_tokenizer(model)
    word, token_id = next(
        (text, i) for text, i in sorted(tokenizer.get_vocab().items()) if text.isalpha() and len(text) > 2
    )
    entry = {"content": word, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    change(model / "tokenizer_config.json", added_tokens_decoder={str(token_id): {**entry, "special": True}})
    changed, reference = checkpoint.load_tokenizer(model), PreTrainedTokenizerFast.from_pretrained(model)
    ids = changed.encode(f"a{word}b", add_special_tokens=False).ids
    assert ids == reference.encode(f"a{word}b", add_special_tokens=False)
    assert token_id in ids
    assert changed.get_added_tokens_decoder()[token_id].special


def test_added_tokens_that_do_not_fit_are_named(model: Path) -> None:
    (model / "added_tokens.json").write_text(json.dumps({"<tool>": 100_000}))
    change(model / "tokenizer_config.json", added_tokens_decoder=None)
    with pytest.raises(InvalidArgument, match=r"added_tokens\.json: token '<tool>' must have id \d+, .* not 100000"):
        checkpoint.load_tokenizer(model)
    change(model / "tokenizer_config.json", added_tokens_decoder={"x": {"content": "<tool>"}})
    with pytest.raises(InvalidArgument, match="added_tokens_decoder cannot be read"):
        checkpoint.load_tokenizer(model)


def test_tokenizer_fingerprint(model: Path) -> None:
    before = checkpoint.tokenizer_fingerprint(model)
    change(model / "config.json", hidden_size=1)
    assert checkpoint.tokenizer_fingerprint(model) == before
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert checkpoint.tokenizer_fingerprint(model) != before


def test_prompts_of_vectors_belong_to_the_tokenizer_and_modules_without_prompts_do_not(model: Path) -> None:
    before = checkpoint.tokenizer_fingerprint(model)
    (model / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer", "path": ""}]))
    assert checkpoint.tokenizer_fingerprint(model) == before
    (model / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "query: "}}))
    assert checkpoint.tokenizer_fingerprint(model) != before


def test_weights_fingerprint(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = checkpoint.weights_fingerprint(model, cache)
    assert checkpoint.weights_fingerprint(model, cache) == before
    (model / "model.safetensors").write_bytes(b"Weights")
    os.utime(model / "model.safetensors", ns=(1, 1))
    after = checkpoint.weights_fingerprint(model, cache)
    assert after != before
    assert after == checkpoint.weights_fingerprint(model, tmp_path / "other")


def test_weights_fingerprint_is_cached(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = checkpoint.weights_fingerprint(model, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "digest_of", lambda files: b"read from the files")
        assert checkpoint.weights_fingerprint(model, tmp_path / "cache") == before
        (entry,) = (tmp_path / "cache" / "weights").iterdir()
        entry.write_text("torn")
        assert checkpoint.weights_fingerprint(model, tmp_path / "cache") != before


def test_a_cache_that_cannot_be_written(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert len(checkpoint.weights_fingerprint(model, tmp_path / "file")) == 32

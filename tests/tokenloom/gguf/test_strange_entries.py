"""Every entry of a GGUF file with a value of every other kind: an error that names the file, or a model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoint.gguf.architectures import MODELS, make, write_model
from tests.tokenloom.gguf.demo_file import add_tokenizer, write_demo_file, write_metadata
from tokenloom.gguf import tokenizer
from tokenloom.gguf.gguf_file import GgufFile, read_gguf
from tokenloom.gpu_worker.checkpoint.gguf import config

VALUES: tuple[Any, ...] = ("text", "", 5, 0, -1, 2**63 - 1, 0.5, float("nan"), True, [], [1, "a"], ["a"], [-1], [0.5])
READERS = (
    tokenizer.make_tokenizer,
    tokenizer.special_tokens,
    tokenizer.eos_token_ids,
    tokenizer.chat_template,
    lambda file: config.gguf_config(file.path, file),
)


MORE_KEYS = (
    *("tokenizer.ggml.token_type", "tokenizer.ggml.scores", "tokenizer.ggml.pre", "tokenizer.ggml.unknown_token_id"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.bos_token_id"),
    *("general.type", "qwen3.rope.scaling.type", "qwen3.rope.scaling.factor", "qwen3.expert_count"),
)
"""Entries that the demo's file has not, or not in both forms."""


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def file(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> GgufFile:
    """The demo model's file, and one that says it had a vocabulary of SentencePiece."""
    path = tmp_path_factory.mktemp("gguf") / "demo.gguf"
    write_demo_file(path)
    file = read_gguf(path)
    if request.param == "gpt2":
        return file
    tokens = file.metadata["tokenizer.ggml.tokens"]
    more = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-float(each) for each in range(len(tokens))]}
    return replace(file, metadata={**file.metadata, **more})


def test_a_value_of_another_kind_is_one_error(file: GgufFile, monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = list[str]()
    for key in {*file.metadata, *MORE_KEYS}:
        for value in VALUES:
            strange = replace(file, metadata={**file.metadata, key: value})
            monkeypatch.setattr(config, "_LAST", {})
            refusals += [f"{key} = {value!r}: {refusal}" for read in READERS if (refusal := refusal_of(read, strange))]
    assert len(refusals) > len(file.metadata) * len(VALUES) / 2
    assert [each for each in refusals if "demo.gguf" not in each] == []


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "phi3, long", "gpt-oss", "deepseek v3", "granite", "ministral3"])
def test_entries_of_other_architectures(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, model_type, entries, _ = MODELS[name]
    file = read_gguf(write_model(tmp_path / "demo.gguf", architecture, make(model_type, **entries)))
    read, refusals = READERS[-1], list[str]()
    assert refusal_of(read, file) == ""
    own = [key for key in file.metadata if key.startswith(f"{architecture}.")]
    for key in own:
        for value in VALUES:
            strange = replace(file, metadata={**file.metadata, key: value})
            monkeypatch.setattr(config, "_LAST", {})
            refusals += [f"{key} = {value!r}: {refusal}" for each in [refusal_of(read, strange)] if (refusal := each)]
    assert len(refusals) > len(own) * len(VALUES) / 2
    assert [each for each in refusals if "demo.gguf" not in each] == []


def refusal_of(read: Callable[[GgufFile], object], file: GgufFile) -> str:
    """Return the message of the error, and of one that is no ``ValueError`` its type only; empty: it was read."""
    try:
        read(file)
    except ValueError as error:
        return str(error)
    except Exception as error:
        return type(error).__name__
    return ""


def test_a_count_of_files_that_is_no_number(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "demo.gguf", add_tokenizer, lambda writer: writer.add_string("split.count", "two"))
    with pytest.raises(ValueError, match=r"demo\.gguf: split\.count must be an integer, found 'two'"):
        read_gguf(path)


def test_a_kind_of_tokens_that_is_no_list(tmp_path: Path) -> None:
    path = write_metadata(tmp_path / "demo.gguf", lambda writer: writer.add_uint32("tokenizer.ggml.token_type", 1))
    file = read_gguf(path)
    with pytest.raises(ValueError, match="token_type must be a list of integers, found 1"):
        tokenizer.eos_token_ids(replace(file, metadata={**file.metadata, "tokenizer.ggml.tokens": ["a"]}))

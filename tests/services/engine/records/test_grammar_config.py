import json
import logging
import shutil
from pathlib import Path

import pytest

from tokenloom.engine_core.data.config import ReasoningConfig
from tokenloom.model_files.checkpoint import load_tokenizer
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.records.grammar_config import reasoning_config, reasoning_mode
from tokenloom.v1 import types_pb2

MARKS = ("<think>", "</think>")


def checkpoint(path: Path, *, template: str = "", with_letters: bool = True) -> Path:
    """Copy the demo model's tokenizer, with another template or without the letters of the marks."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(DEMO_MODEL / name, path / name)
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if not with_letters:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "Replace", "pattern": {"String": "think"}, "content": ""}
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_the_template_decides_unless_a_parser_is_chosen(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, template="{{ content.split('</think>')[-1] }}")
    start, end = (tuple(load_tokenizer(path).encode(mark, add_special_tokens=False).ids) for mark in MARKS)
    found = reasoning_config(path, ReasoningConfig()).marks
    assert found is not None
    assert (found.start, found.end, found.begins_inside) == (start, end, False)
    chosen = reasoning_config(path, ReasoningConfig(parser="deepseek_r1")).marks
    assert chosen is not None
    assert chosen.begins_inside
    assert reasoning_config(path, ReasoningConfig(parser="none")).marks is None
    assert reasoning_config(DEMO_MODEL, ReasoningConfig()).marks is None


def test_a_tokenizer_that_cannot_write_the_marks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = checkpoint(tmp_path, template="</think>", with_letters=False)
    with pytest.raises(ValueError, match="reasoning_parser is qwen3, but the model's tokenizer cannot write"):
        reasoning_config(path, ReasoningConfig(parser="qwen3"))
    with caplog.at_level(logging.WARNING):
        assert reasoning_config(path, ReasoningConfig()).marks is None
    assert "fall-back no_reasoning: " in caplog.text


def test_what_an_engine_reports() -> None:
    plain, covering = ReasoningConfig(), ReasoningConfig(enable_in_reasoning=True)
    assert reasoning_mode(plain, finds_reasoning=True) == types_pb2.REASONING_MODE_FREE
    assert reasoning_mode(covering, finds_reasoning=True) == types_pb2.REASONING_MODE_CONSTRAINED
    assert reasoning_mode(covering, finds_reasoning=False) == types_pb2.REASONING_MODE_UNSPECIFIED


def test_a_given_template_decides_instead_of_the_checkpoints(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, template="none")
    assert reasoning_config(path, ReasoningConfig()).marks is None
    assert reasoning_config(path, ReasoningConfig(), "</think>").marks is not None

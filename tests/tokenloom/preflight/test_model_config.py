"""The context length that the user asked for, before a process starts."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.preflight.model import check_context
from tokenloom.preflight.small_files import CannotServe


def checkpoint(path: Path, **config: Any) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_serve_refuses_more_than_the_context_of_the_model() -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--max-model-len", "2049"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "--max-model-len 2049: the model's context has 2048 tokens" in line


@pytest.mark.parametrize(
    "rope",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
)
def test_plain_positions_end_at_the_context(tmp_path: Path, rope: dict[str, Any]) -> None:
    path = checkpoint(tmp_path, max_position_embeddings=128, **rope)
    check_context(path, 128)
    with pytest.raises(
        CannotServe, match=r"128 tokens \(max_position_embeddings in .*config.json\): give at most that"
    ):
        check_context(path, 129)


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 128, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"max_position_embeddings": 128, "rope_scaling": {"rope_type": "longrope"}},
        {"max_position_embeddings": 128, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        {"max_position_embeddings": 128, "rope_scaling": "a word"},
        {"n_positions": 128},
    ],
)
def test_what_the_engine_may_accept_passes(tmp_path: Path, config: dict[str, Any]) -> None:
    check_context(checkpoint(tmp_path, **config), 512)


@pytest.mark.parametrize("length", [1, 0, -1])
def test_less_than_two_tokens_are_refused_for_every_model(tmp_path: Path, length: int) -> None:
    with pytest.raises(CannotServe, match="at least 2"):
        check_context(tmp_path, length)


def test_nothing_asked_for_passes(tmp_path: Path) -> None:
    check_context(tmp_path, None)

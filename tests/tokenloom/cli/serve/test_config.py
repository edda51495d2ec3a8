"""``tokenloom config`` names the source of each value."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app


def sources(*arguments: str) -> dict[str, tuple[str, str]]:
    result = CliRunner().invoke(app, ["config", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return {row["option"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}


def test_every_value_has_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text(
        'engines = 3\nport = 9000\n[tokenizer]\nmetrics_listen = "127.0.0.1:9"\n[scheduler]\nmax_num_seqs = 7\n'
    )
    monkeypatch.setenv("TOKENLOOM_BLOCK_SIZE", "32")
    found = sources("./model", "--config", str(file), "--port", "9001", "--strict")
    assert found["model"] == ("./model", "flag")
    assert found["port"] == ("9001", "flag")
    assert found["strict"] == ("true", "flag")
    assert found["engines"] == ("3", f"file {file}")
    assert found["max_num_seqs"] == ("7", f"file {file}")
    assert found["max_num_batched_tokens"] == ("2048 (8192 on a GPU)", "default")
    assert found["tokenizer.metrics_listen"] == ("127.0.0.1:9", f"file {file}")
    assert found["block_size"] == ("32", "environment TOKENLOOM_BLOCK_SIZE")
    assert found["host"] == ("127.0.0.1", "default")


def test_several_names_are_listed() -> None:
    found = sources("--changed", "./model", "--served-model-name", "a", "b")
    assert found == {"model": ("./model", "flag"), "served_model_name": ("a,b", "flag")}


def test_defaults_can_be_left_out() -> None:
    assert sources("--changed", "--engines", "2") == {"engines": ("2", "flag")}


def test_secrets_are_not_shown() -> None:
    result = CliRunner().invoke(app, ["config", "--changed"], env={"TOKENLOOM_API_KEY": "abc123"})
    assert "abc123" not in result.output
    assert "environment TOKENLOOM_API_KEY" in result.output


def test_wrong_values_are_refused_as_by_serve() -> None:
    assert CliRunner().invoke(app, ["config", "--port", "70000"]).exit_code == 2

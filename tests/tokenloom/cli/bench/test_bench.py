"""The commands' options."""

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenloom.cli.bench.bench_peers import _options, _pythons
from tokenloom.cli.main import app


@pytest.mark.parametrize(
    "command",
    [
        "serve",
        "throughput",
        "mesh",
        "overload",
        "scale",
        "agents",
        "step",
        "kv",
        "disaggregated",
        "peers",
        "model",
        "--help",
    ],
)
def test_every_command_explains_itself(command: str) -> None:
    result = CliRunner().invoke(app, ["bench", command, *(["--help"] if command != "--help" else [])])
    assert result.exit_code == 0, result.output


def test_ways_that_blocks_cannot_go() -> None:
    result = CliRunner().invoke(app, ["bench", "kv", "pigeon"])
    assert result.exit_code == 1
    assert "the way 'pigeon' does not work on this machine; available: shm, " in result.output


def test_objectives_may_follow_each_other_as_in_vllm() -> None:
    result = CliRunner().invoke(
        app, ["bench", "serve", "--vocab-size", "9", "--goodput", "ttft:5", "--num-prompts", "1", "tpot:x"]
    )
    assert result.exit_code == 1
    assert "tpot:x" in result.output


def test_a_server_that_is_not_there_fails_every_request(tmp_path: Path) -> None:
    arguments = ["--base-url", "http://127.0.0.1:1", "--vocab-size", "9", "--num-prompts", "2", "--json"]
    result = CliRunner().invoke(app, ["bench", "serve", *arguments, "--result-filename", str(tmp_path / "r.json")])
    assert result.exit_code == 1
    assert '"failed": 2' in (tmp_path / "r.json").read_text()
    assert json.loads(result.stdout)["failed"] == 2


def test_a_server_that_answers_nothing_is_one_line() -> None:
    arguments = ["--base-url", "http://127.0.0.1:1", "--vocab-size", "9", "--num-prompts", "2"]
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: http://127.0.0.1:1 answered none of 2 requests: ")
    assert "refused" in line.lower()


def test_interpreters_are_named_or_found(tmp_path: Path) -> None:
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert _pythons(["llamacpp=/l/python"], tmp_path) == {
        "tokenloom": sys.executable,
        "vllm": str(python),
        "llamacpp": "/l/python",
    }
    for text in ("vllm", "other=/python"):
        with pytest.raises(ValueError, match="ENGINE=INTERPRETER"):
            _pythons([text], None)


def test_options_go_to_their_engine() -> None:
    assert _options(["openvino.kv=bf16", "vllm.eager=1", "openvino.prime=1"]) == {
        "openvino": {"kv": "bf16", "prime": "1"},
        "vllm": {"eager": "1"},
    }
    for text in ("kv=bf16", "openvino.kv", "other.kv=1"):
        with pytest.raises(ValueError, match=r"ENGINE\.NAME=VALUE"):
            _options([text])

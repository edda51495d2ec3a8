"""``serve --config``: who wins, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tokenloom.cli.main import app
from tokenloom.cli.mesh import serve
from tokenloom.supervisor.layout import MeshOptions
from tokenloom.supervisor.run import Outcome


@pytest.fixture
def meshes(monkeypatch: pytest.MonkeyPatch) -> list[MeshOptions]:
    """What would have been started."""
    started: list[MeshOptions] = []

    async def run_mesh(options: MeshOptions, *_: Any) -> Outcome:
        started.append(options)
        return Outcome(interrupted=False, clean=True)

    monkeypatch.setattr(serve, "run_mesh", run_mesh)
    return started


def run(path: Path, text: str, *arguments: str) -> Result:
    path.write_text(text)
    return CliRunner().invoke(app, ["serve", "--config", str(path), *arguments])


def test_flags_go_before_the_file_and_the_file_before_defaults(meshes: list[MeshOptions], tmp_path: Path) -> None:
    text = (
        'engines = 3\nport = 9000\nmax-num-seqs = 7\nlog_level = "debug"\nstrict = true\n[engine]\nwatermark = 0.25\n'
    )
    result = run(tmp_path / "mesh.toml", text, "--port", "9001", "--no-enable-prefix-caching")
    assert result.exit_code == 0, result.output
    (options,) = meshes
    assert (options.engines, options.port, options.tokenizers) == (3, 9001, 1)
    assert "--strict" in options.flags["gateway"]
    engine = " ".join(options.flags["engine"])
    assert engine.startswith("--watermark=0.25 --no-enable-prefix-caching ")
    assert "--max-num-seqs 7" in engine
    assert " ".join(options.common_flags).startswith("--log-level debug")


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_other_forms_of_file(meshes: list[MeshOptions], tmp_path: Path, suffix: str) -> None:
    values = {"engines": 2, "tokenizer": {"metrics-listen": "127.0.0.1:0"}}
    result = run(tmp_path / f"mesh{suffix}", json.dumps(values))
    assert result.exit_code == 0, result.output
    assert [options.engines for options in meshes] == [2]
    assert meshes[0].flags["tokenizer"] == ("--metrics-listen=127.0.0.1:0",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine_count = 3", "no such setting"),
        ("prot = 3", "did you mean port?"),
        ("engine = 3", "engine must be a table"),
        ("[engine]\nwatermrak = 0.1", "did you mean watermark?"),
        ("[engine]\ndtype = 'float32'", "belongs at the top"),
        ("[engine]\nrole = 'prefill'", "not yours to set"),
        ("config = 'a'", "no such setting"),
        ("port = 'x'", "--port"),
        ("port", "cannot be parsed"),
    ],
)
def test_what_is_wrong_is_a_usage_error(meshes: list[MeshOptions], tmp_path: Path, text: str, message: str) -> None:
    result = run(tmp_path / "mesh.toml", text)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert meshes == []


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--config", str(tmp_path / "nothing.toml")])
    assert result.exit_code == 2
    assert "cannot read" in result.output

"""``tokenloom doctor``."""

import json
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tokenloom.cli import doctor
from tokenloom.cli.main import app
from tokenloom.preflight.findings import Finding
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, mesh_directory, write_record


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "examine_engine", lambda: iter([Finding("warn", "kernels", "none")]))


def test_warnings_do_not_fail() -> None:
    result = CliRunner().invoke(app, ["doctor", "--port", "0"])
    assert result.exit_code == 0, result.output
    assert "warn  kernels        none" in result.stdout.splitlines()


def test_lines_fit_a_terminal_and_are_cut_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "none built ahead; g++ compiles them at the first start, and they are kept in /a/folder-with-a-long-name"
    monkeypatch.setattr(doctor, "examine_engine", lambda: iter([Finding("warn", "kernels", text)]))
    result = CliRunner().invoke(app, ["doctor", "--port", "0"], env={"COLUMNS": "60"})
    lines = result.stdout.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("warn  kernels "))
    assert lines[first : first + 3] == [
        "warn  kernels        none built ahead; g++ compiles them at",
        "                     the first start, and they are kept in",
        "                     /a/folder-with-a-long-name",
    ]
    assert max(map(len, lines)) <= 60


def test_a_taken_port_fails() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = CliRunner().invoke(app, ["doctor", "--port", str(port), "--json"])
    assert result.exit_code == 1
    assert [each["subject"] for each in json.loads(result.stdout) if each["level"] == "fail"] == ["ports"]


def test_what_the_parts_of_running_meshes_do_without(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    with mesh_directory() as directory:
        state = {"pid": 1, "address": "a", "fall_backs": [{"kind": "slow_kernels", "subject": "", "detail": "no g++"}]}
        (directory / "e0.json").write_text(json.dumps(state))
        parts = [PartRecord("engine", 0, None, f"{directory}/e0.json"), PartRecord("engine", 1, None, "none")]
        write_record(directory, MeshRecord(1, 8123, parts))
        result = CliRunner().invoke(app, ["doctor", "--port", "0"])
    assert "warn  fall-backs     engine-0 on port 8123: slow_kernels: no g++" in result.stdout.splitlines()

"""``tokenloom top`` on a mesh whose parts are down; a live one is watched in the end-to-end tests."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tokenloom.cli.terminal import terminal
from tokenloom.cli.main import app
from tokenloom.supervisor import state_dir
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord


@pytest.fixture
def mesh() -> Iterator[Path]:
    with state_dir.mesh_directory() as directory:
        parts = [PartRecord("engine", 0, "both", str(directory / "e.json"))]
        state_dir.write_record(directory, MeshRecord(7, 8000, parts))
        yield directory


def test_no_mesh_ends_with_status_1() -> None:
    result = CliRunner().invoke(app, ["top"])
    assert result.exit_code == 1
    assert "no mesh is running" in result.stderr


@pytest.mark.usefixtures("mesh")
def test_one_look_as_a_table_and_as_an_object() -> None:
    table = CliRunner().invoke(app, ["top", "--once", "--interval", "0.1"])
    assert "0 of 1 parts are serving" in table.stdout
    assert "engine-0" in table.stdout
    seen = json.loads(CliRunner().invoke(app, ["top", "--json", "--interval", "0.1"]).stdout)
    assert (seen["parts"][0]["service"], seen["parts"][0]["health"]) == ("engine", "NOT_SERVING")
    assert seen["time_to_first_token"] == {"p50_ms": None, "p95_ms": None}
    assert CliRunner().invoke(app, ["top", "--once", "--port", "1"]).exit_code == 1


@pytest.mark.usefixtures("mesh")
def test_on_a_terminal_it_goes_on_until_ctrl_c(runtime_dir: Path) -> None:
    names = {"XDG_RUNTIME_DIR": str(runtime_dir), "TERM": "xterm", "COLUMNS": "140", "LINES": "20"}
    with terminal("top", "--interval", "0.1", environment=names) as screen:
        screen.read_until("engine-0")
        screen.read_until("engine-0")
        screen.type("\x03")
        assert screen.end() == 0

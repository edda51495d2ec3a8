"""`ps` with a mesh of one live and one dead part."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.cli.mesh import mesh_sample
from tokenloom.cli.mesh.mesh_sample import rows_of
from tokenloom.services.runtime.host.host import Host
from tokenloom.services.runtime.host.service import running
from tokenloom.services.runtime.host.service_settings import ServiceSettings
from tokenloom.supervisor import state_dir
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord


class FakeSettings(ServiceSettings, frozen=True, kw_only=True):
    service: ClassVar[str] = "fake"


class FakeService:
    async def start(self, host: Host) -> None: ...
    async def drain(self) -> None: ...
    async def stop(self) -> None: ...


@pytest.fixture(autouse=True)
def pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that run tests side by side have the width of a terminal in their environment."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
async def record(socket_dir: Path) -> AsyncIterator[MeshRecord]:
    """A mesh whose tokenizer serves and whose engine is down."""
    state_file = socket_dir / "t.json"
    settings = FakeSettings.of(listen=f"unix:{socket_dir}/t.sock", metrics_listen="", state_file=state_file)
    parts = [
        PartRecord("tokenizer", 0, None, str(state_file)),
        PartRecord("engine", 0, "both", str(socket_dir / "e.json")),
    ]
    async with running(FakeService(), settings):
        yield MeshRecord(1, 8000, parts)


async def test_a_row_says_who_where_and_how(record: MeshRecord, socket_dir: Path) -> None:
    tokenizer, engine = await rows_of(record)
    assert tokenizer.health == "SERVING"
    assert tokenizer.address == f"unix:{socket_dir}/t.sock"
    assert tokenizer.pid is not None
    assert (engine.role, engine.pid, engine.address, engine.health) == ("both", None, None, "NOT_SERVING")


def _write_state(path: Path, *fall_backs: dict[str, str]) -> None:
    path.write_text(json.dumps({"pid": 7, "address": "unix:/nowhere", "fall_backs": [*fall_backs, "damaged"]}))


async def test_a_row_says_what_a_part_does_without_and_what_the_coordinator_knows(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_serving(address: str) -> bool:
        return True

    monkeypatch.setattr(mesh_sample, "is_serving", is_serving)
    aside = {"kind": "other_weights", "subject": "engine-0", "detail": "x"}
    unreached = {"kind": "unreached", "subject": "engine-1", "detail": "y"}
    _write_state(socket_dir / "c.json", aside, unreached)
    _write_state(
        socket_dir / "e0.json", {"kind": "slow_kernels", "subject": "", "detail": "no g++"}, aside | {"subject": ""}
    )
    for index in (1, 2):
        _write_state(socket_dir / f"e{index}.json")
    parts = [PartRecord("engine", index, "both", str(socket_dir / f"e{index}.json")) for index in range(3)]
    coordinator = PartRecord("coordinator", 0, None, str(socket_dir / "c.json"))
    rows = await rows_of(MeshRecord(1, 8000, [coordinator, *parts]))
    assert [row.health for row in rows] == ["SERVING", "ASIDE", "UNREACHED", "SERVING"]
    assert [row.fall_backs for row in rows] == [
        ["engine-0: other_weights: x", "engine-1: unreached: y"],
        ["slow_kernels: no g++", "other_weights: x"],
        ["unreached: y"],
        [],
    ]


def test_without_a_mesh_it_says_so() -> None:
    result = CliRunner().invoke(app, ["ps"])
    assert result.exit_code == 0
    assert "No mesh is running" in result.stderr
    assert json.loads(CliRunner().invoke(app, ["ps", "--json"]).stdout) == []


def test_the_port_chooses_the_mesh() -> None:
    with state_dir.mesh_directory() as first, state_dir.mesh_directory() as second:
        for port, directory in ((1, first), (2, second)):
            parts = [PartRecord("engine", port, "both", str(directory / "e.json"))]
            state_dir.write_record(directory, MeshRecord(7, port, parts))
        newest = json.loads(CliRunner().invoke(app, ["ps", "--json"]).stdout)
        chosen = json.loads(CliRunner().invoke(app, ["ps", "--json", "--port", "1"]).stdout)
        assert [part["index"] for part in newest] == [2]
        assert chosen == [
            {
                "service": "engine",
                "index": 1,
                "role": "both",
                "pid": None,
                "address": None,
                "metrics": None,
                "health": "NOT_SERVING",
                "model": "",
                "fall_backs": [],
                "placement": None,
                "plugins": [],
            }
        ]
        assert CliRunner().invoke(app, ["ps", "--port", "3"]).exit_code == 1
        assert "engine" in CliRunner().invoke(app, ["ps"]).stdout


def test_models_are_named_if_there_are_several() -> None:
    with state_dir.mesh_directory() as directory:
        file = str(directory / "e.json")
        for models, named in ((["large"], False), (["large", "small"], True)):
            parts = [PartRecord("engine", index, "both", file, model) for index, model in enumerate(models)]
            state_dir.write_record(directory, MeshRecord(7, 1, [*parts, PartRecord("gateway", 0, None, file)]))
            printed = CliRunner().invoke(app, ["ps"]).stdout
            assert ("MODEL" in printed, "small" in printed) == (named, named)


def test_cells_are_no_markup(socket_dir: Path) -> None:
    state = {"pid": 7, "address": "[fd00::1]:9000", "metrics": "[fd00::1]:9001", "health": f"unix:{socket_dir}/none"}
    for name in ("first", "second"):
        (socket_dir / f"{name}.json").write_text(json.dumps(state))
    models = ("[/INST]", "m[v2]")
    parts = [
        PartRecord("engine", number, "[bold]", str(socket_dir / f"{name}.json"), model)
        for number, (name, model) in enumerate(zip(("first", "second"), models, strict=True))
    ]
    with state_dir.mesh_directory() as directory:
        state_dir.write_record(directory, MeshRecord(1, 8000, parts))
        result = CliRunner().invoke(app, ["ps"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    common = ["7", "[fd00::1]:9000", "[fd00::1]:9001", "NOT_SERVING"]
    assert rows == [["engine", str(number), model, "[bold]", *common] for number, model in enumerate(models)]


def test_a_terminal_of_80_columns_has_no_pids_and_short_names_of_sockets(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "/tmp/tokenloom-0/mesh-xj7nvsbc"
    parts = []
    for number, service in enumerate(("output_processor", "engine")):
        state = {"pid": 7654321, "address": f"unix:{folder}/{service}-0.sock", "metrics": "127.0.0.1:44033"}
        (socket_dir / f"{service}.json").write_text(json.dumps(state | {"health": f"unix:{socket_dir}/none"}))
        role = "prefill" if number else None
        parts.append(PartRecord(service, 0, role, str(socket_dir / f"{service}.json")))
    with state_dir.mesh_directory() as directory:
        state_dir.write_record(directory, MeshRecord(1, 8000, parts))
        piped = CliRunner().invoke(app, ["ps"]).stdout
        monkeypatch.setenv("COLUMNS", "80")
        narrow = CliRunner().invoke(app, ["ps"]).stdout
        wide = CliRunner().invoke(app, ["ps", "--wide"]).stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert "7654321" not in narrow
    assert "…/output_processor-0.sock" in narrow
    assert piped == wide
    assert f"unix:{folder}/engine-0.sock" in wide
    assert {"7654321", "prefill"} <= set(wide.split())

"""The private directory, and which meshes are alive."""

import fcntl
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tokenloom.supervisor import state_dir
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, StateDirError


@pytest.fixture(autouse=True)
def runtime_dir(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    return socket_dir


def test_the_directory_is_private() -> None:
    assert stat.S_IMODE(state_dir.root().stat().st_mode) == 0o700


def test_a_directory_that_others_can_enter_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "tokenloom").mkdir(mode=0o755)
    with pytest.raises(StateDirError, match="mode 0700"):
        state_dir.root()


def test_a_link_is_refused(runtime_dir: Path, tmp_path: Path) -> None:
    (runtime_dir / "tokenloom").symlink_to(tmp_path)
    with pytest.raises(StateDirError):
        state_dir.root()


def test_live_meshes_are_found_newest_first() -> None:
    with state_dir.mesh_directory() as older, state_dir.mesh_directory() as newer:
        for port, directory in ((1, older), (2, newer)):
            state_dir.write_record(directory, MeshRecord(7, port, [PartRecord("engine", 0, "both", "s.json")]))
            os.utime(directory / "lock", ns=(0, 0))  # a file system's clock may not distinguish them
        assert [mesh.port for mesh in state_dir.running_meshes()] == [2, 1]
        assert state_dir.running_meshes()[0].parts == [PartRecord("engine", 0, "both", "s.json")]
    assert state_dir.running_meshes() == []
    assert not older.exists()


def test_what_a_killed_supervisor_left_is_ignored_and_cleared() -> None:
    script = (
        "import os\nfrom tokenloom.supervisor import state_dir as s\n"
        "with s.mesh_directory() as d:\n"
        " s.write_record(d, s.MeshRecord(1, 8000, []))\n print(d, flush=True)\n os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    dead = Path(done.stdout.strip())
    assert dead.exists()
    assert state_dir.running_meshes() == []
    with state_dir.mesh_directory():
        assert not dead.exists()


def test_two_meshes_that_start_at_the_same_time_leave_each_other_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp

    def make_while_another_starts(**options: Any) -> str:
        made = make(**options)
        monkeypatch.setattr(tempfile, "mkdtemp", make)
        with state_dir.mesh_directory():  # clears what dead meshes left
            return made

    monkeypatch.setattr(tempfile, "mkdtemp", make_while_another_starts)
    with state_dir.mesh_directory() as directory:
        state_dir.write_record(directory, MeshRecord(7, 1, []))
        assert len(state_dir.running_meshes()) == 1


def test_two_that_look_at_the_same_time_both_see_that_a_mesh_is_dead(runtime_dir: Path) -> None:
    dead = state_dir.root() / "mesh-dead"
    dead.mkdir()
    (dead / "lock").touch()
    state_dir.write_record(dead, MeshRecord(7, 1, []))
    with open(dead / "lock") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert state_dir.running_meshes() == []


def test_a_part_that_is_not_bound_has_no_state(tmp_path: Path) -> None:
    file = tmp_path / "engine-0.json"
    assert state_dir.read_part_state(file) is None
    file.write_text(json.dumps({"pid": 5, "address": "unix:/a", "metrics": "", "other": 1}))
    assert state_dir.read_part_state(file) == state_dir.PartState(5, "unix:/a", None, None, "unix:/a")

"""The private directory, and which meshes are alive."""

import errno
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


def test_what_a_supervisor_left_that_was_killed_early_is_cleared_later() -> None:
    young, old = (Path(tempfile.mkdtemp(prefix="new-mesh-", dir=state_dir.root())) for _ in range(2))
    os.utime(old, (0, 0))
    with state_dir.mesh_directory():
        assert (young.exists(), old.exists()) == (True, False)


def test_a_pipe_with_the_name_of_a_mesh_is_not_opened() -> None:
    """A look at it would wait for ever."""
    os.mkfifo(state_dir.root() / "mesh-pipe")
    (state_dir.root() / "mesh-file").write_text("")
    assert state_dir.running_meshes() == []
    with state_dir.mesh_directory():
        assert state_dir.running_meshes() == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\0",
        "null",
        "[1]",
        "{}",
        '{"pid": 1, "port": "8000", "parts": []}',
        '{"pid": 1, "port": 8000, "parts": "gateway"}',
        '{"pid": 1, "port": 8000, "parts": [{"service": 1, "index": 0, "role": null, "state_file": "x"}]}',
        '{"pid": 1, "port": 8000, "parts": [{"service": "gateway", "index": 0, "role": [], "state_file": 5}]}',
    ],
)
def test_an_odd_record_is_named_unless_another_mesh_runs(content: str) -> None:
    with state_dir.mesh_directory() as odd:
        assert state_dir.running_meshes() == [], "a mesh that starts has no record yet"
        (odd / "mesh.json").write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(StateDirError, match="describes no mesh: stop"):
            state_dir.running_meshes()
        assert state_dir.read_part_state(odd / "mesh.json") is None
        with state_dir.mesh_directory() as good:
            state_dir.write_record(good, MeshRecord(7, 1, []))
            assert state_dir.running_meshes() == [MeshRecord(7, 1, [])]


@pytest.mark.parametrize(
    "changed",
    [
        {"pid": "x"},
        {"pid": None},
        {"address": 5},
        {"metrics": 5},
        {"http": "nor this"},
        {"health": [1]},
        {"role": {"a": 1}},
    ],
)
def test_an_odd_state_is_as_none(runtime_dir: Path, changed: dict[str, object]) -> None:
    path = runtime_dir / "state.json"
    good: dict[str, object] = {"pid": 1, "address": "unix:/a", "http": "127.0.0.1:8000", "certificate": "/c"}
    path.write_text(json.dumps(good))
    state = state_dir.read_part_state(path)
    assert state is not None
    assert (state.health, state.http, state.certificate) == ("unix:/a", "127.0.0.1:8000", Path("/c"))
    path.write_text(json.dumps(good | changed))
    assert state_dir.read_part_state(path) is None


def test_odd_fall_backs_of_a_state_are_left_out(runtime_dir: Path) -> None:
    path = runtime_dir / "state.json"
    good = {"kind": "offload_file", "subject": "", "detail": "full"}
    odd = [5, {"kind": "offload_file"}, {**good, "kind": 5}, {**good, "more": "x"}]
    path.write_text(json.dumps({"pid": 1, "address": "unix:/a", "fall_backs": [*odd, good]}))
    state = state_dir.read_part_state(path)
    assert state is not None
    assert [*state.fall_backs] == [("offload_file", "", "full")]


def test_a_directory_that_cannot_get_its_name_is_not_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Path:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StateDirError, match="Input/output error"), state_dir.mesh_directory():
        pass
    assert list(state_dir.root().iterdir()) == []


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


def test_a_mesh_whose_lock_file_a_cleaner_removed_lives_on() -> None:
    """Cleaners of temporary folders remove files that are old; the next mesh must not take the first one for dead."""
    with state_dir.mesh_directory() as directory:
        state_dir.write_record(directory, MeshRecord(7, 8000, []))
        (directory / "lock").unlink()
        with state_dir.mesh_directory() as newer:
            state_dir.write_record(newer, MeshRecord(8, 9000, []))
            assert directory.exists()
            assert [mesh.port for mesh in state_dir.running_meshes()] == [9000, 8000]


def test_a_mesh_of_which_nothing_is_known_is_not_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = state_dir.root() / "mesh-unknown"
    unknown.mkdir(mode=0o700)
    (unknown / "lock").touch()

    def scarce(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", scarce)
        with pytest.raises(StateDirError, match="No locks available"), state_dir.mesh_directory():
            pass
    assert list(unknown.parent.iterdir()) == [unknown]


@pytest.mark.parametrize("place", ["/dev/null/run", "/proc/run", "~nosuch", "a" * 300])
def test_a_directory_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", place)
    if place == "~nosuch":
        (tmp_path / place).touch()
    with pytest.raises(StateDirError, match="set XDG_RUNTIME_DIR"):
        state_dir.root()


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
    assert state_dir.read_part_state(file) == state_dir.PartReport(5, "unix:/a", None, None, "unix:/a")

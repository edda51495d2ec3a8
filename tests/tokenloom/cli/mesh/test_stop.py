"""``tokenloom stop`` signals supervisors of this user, and waits for their end."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.cli.mesh import local_mesh as stop
from tokenloom.supervisor.state_dir import MeshRecord, mesh_directory, write_record


class Supervisors:
    """Stands in for processes with locked directories, which end at the first signal unless they drain."""

    def __init__(self) -> None:
        self.signals: list[tuple[int, int]] = []
        self.drains = False
        self._meshes: dict[int, ExitStack] = {}

    def start(self, pid: int, port: int) -> None:
        self._meshes[pid] = stack = ExitStack()
        write_record(stack.enter_context(mesh_directory()), MeshRecord(pid, port, []))

    def kill(self, pid: int, number: int) -> None:
        self.signals.append((pid, number))
        if not self.drains:
            self._meshes[pid].close()

    def close(self) -> None:
        for stack in self._meshes.values():
            stack.close()


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisors]:
    fake = Supervisors()
    monkeypatch.setattr(stop.os, "kill", fake.kill)
    monkeypatch.setattr(stop, "_POLL_SECONDS", 0.0)
    yield fake
    fake.close()


def test_the_newest_mesh_is_stopped(supervisors: Supervisors) -> None:
    supervisors.start(11, 8000)
    supervisors.start(12, 8001)
    result = CliRunner().invoke(app, ["stop"])
    assert (result.exit_code, result.stdout) == (0, "The mesh on port 8001 has stopped.\n")
    assert supervisors.signals == [(12, signal.SIGTERM)]


@pytest.mark.parametrize(("arguments", "pids"), [(["--port", "8000"], [11]), (["--all"], [12, 11])])
def test_meshes_are_chosen(supervisors: Supervisors, arguments: list[str], pids: list[int]) -> None:
    supervisors.start(11, 8000)
    supervisors.start(12, 8001)
    assert CliRunner().invoke(app, ["stop", *arguments]).exit_code == 0
    assert [pid for pid, _ in supervisors.signals] == pids


def test_nothing_to_stop(supervisors: Supervisors) -> None:
    assert CliRunner().invoke(app, ["stop"]).exit_code == 0
    result = CliRunner().invoke(app, ["stop", "--port", "8000"])
    assert (result.exit_code, result.stderr) == (1, "No mesh of this user is running on port 8000.\n")
    assert supervisors.signals == []


def test_a_mesh_that_drains_is_named_in_the_end(supervisors: Supervisors) -> None:
    supervisors.drains = True
    supervisors.start(11, 8000)
    result = CliRunner().invoke(app, ["stop", "--timeout", "0"])
    assert result.exit_code == 1
    assert "the mesh on port 8000 still has live requests; add --kill" in result.stderr


def test_a_second_signal_kills(supervisors: Supervisors) -> None:
    supervisors.drains = True
    supervisors.start(11, 8000)
    CliRunner().invoke(app, ["stop", "--kill", "--timeout", "0"])
    assert supervisors.signals == [(11, signal.SIGTERM)] * 2


def test_a_supervisor_that_has_just_ended_counts_as_stopped(
    supervisors: Supervisors, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(pid: int, number: int) -> None:
        supervisors.kill(pid, number)
        raise ProcessLookupError

    supervisors.start(os.getpid(), 8000)
    monkeypatch.setattr(stop.os, "kill", end)
    assert CliRunner().invoke(app, ["stop"]).exit_code == 0

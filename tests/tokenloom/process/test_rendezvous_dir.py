"""What a killed process leaves is removed by the next one, and nothing else is."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tokenloom.process.rendezvous_dir import RendezvousDir

OWNER = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from tokenloom.process.rendezvous_dir import RendezvousDir
directory = RendezvousDir(sys.argv[2])
(directory.path / "store").touch()
print(directory.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def make_old(path: Path) -> None:
    os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.parametrize("kind", ["ranks", "core", "worker"])
def test_what_a_killed_owner_left_is_removed_and_what_a_live_one_has_is_not(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        make_old(path)
        RendezvousDir(kind).remove()
        assert (path / "store").exists(), "its owner runs"
        owner.send_signal(signal.SIGKILL)
    assert path.exists()
    RendezvousDir(kind).remove()
    assert not list(tmp_path.iterdir())


def test_a_directory_that_was_made_just_now_stays(tmp_path: Path) -> None:
    (tmp_path / "tl-ranks-new").mkdir()
    (tmp_path / "tl-other").mkdir()
    make_old(tmp_path / "tl-other")
    directory = RendezvousDir()
    assert directory.path.stat().st_mode & 0o777 == 0o700
    directory.remove()
    directory.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tl-other", "tl-ranks-new"]

"""Paths and files of the sockets of local streams."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tokenloom.services.runtime.local_streams import sockets


def test_the_path_next_to_the_unix_socket_of_grpc() -> None:
    assert sockets.path_beside("unix:/run/mesh/engine-0.sock") == "/run/mesh/engine-0.sock.calls"
    assert sockets.path_beside("unix:///run/e") == "/run/e.calls"
    assert sockets.path_beside("127.0.0.1:80") is None
    assert sockets.path_beside("dns:///engines:80") is None


def test_a_path_that_leaves_no_room() -> None:
    assert sockets.path_beside("unix:/" + "a" * 100) == "/" + "a" * 100 + ".calls"
    assert sockets.path_beside("unix:/" + "a" * 101) is None


def test_no_listener(socket_dir: Path) -> None:
    assert sockets.connect(str(socket_dir / "s")) is None
    (socket_dir / "file").touch()
    assert sockets.connect(str(socket_dir / "file")) is None


def test_a_killed_process_makes_room(socket_dir: Path) -> None:
    path = str(socket_dir / "s")
    code = f"import os, socket; s = socket.socket(1); s.bind({path!r}); s.listen(); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert os.path.exists(path)
    assert sockets.connect(path) is None
    with sockets.listen(path), sockets.connect(path) or pytest.fail("nobody listens"):
        pass


def test_a_file_that_is_no_socket_stays(socket_dir: Path) -> None:
    path = socket_dir / "s"
    path.write_text("somebody's")
    with pytest.raises(OSError, match="in use"):
        sockets.listen(str(path))
    assert path.read_text() == "somebody's"


def test_a_full_queue_counts_as_no_listener(socket_dir: Path) -> None:
    path = str(socket_dir / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with sockets.connect(path) or pytest.fail("nobody listens"):
            assert sockets.connect(path) is None

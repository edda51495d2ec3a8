"""Paths and files of the sockets of local streams."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.process import unix_socket
from tokenloom.services.runtime.local_streams import socket_end as sockets
from tokenloom.services.runtime.local_streams.channel import connect


def test_the_path_next_to_the_unix_socket_of_grpc() -> None:
    assert sockets.path_beside("unix:/run/mesh/engine-0.sock") == "/run/mesh/engine-0.sock.calls"
    assert sockets.path_beside("unix:///run/e") == "/run/e.calls"
    assert sockets.path_beside("127.0.0.1:80") is None
    assert sockets.path_beside("dns:///engines:80") is None


def test_a_path_that_leaves_no_room() -> None:
    assert sockets.path_beside("unix:/" + "a" * 100) == "/" + "a" * 100 + ".calls"
    assert sockets.path_beside("unix:/" + "a" * 101) is None


def test_no_listener(socket_dir: Path) -> None:
    assert connect(str(socket_dir / "s")) is None
    (socket_dir / "file").touch()
    assert connect(str(socket_dir / "file")) is None


def test_a_killed_process_makes_room(socket_dir: Path) -> None:
    path = str(socket_dir / "s")
    code = f"import os, socket; s = socket.socket(1); s.bind({path!r}); s.listen(); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert os.path.exists(path)
    assert connect(path) is None
    with unix_socket.listen(path, 1), connect(path) or pytest.fail("no socket listens"):
        pass


def test_a_file_that_is_no_socket_stays(socket_dir: Path) -> None:
    path = socket_dir / "s"
    path.write_text("somebody's")
    with pytest.raises(OSError, match="in use"):
        unix_socket.listen(str(path), 1)
    assert path.read_text() == "somebody's"


def test_a_full_queue_counts_as_no_listener(socket_dir: Path) -> None:
    path = str(socket_dir / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(0)
        with connect(path) or pytest.fail("no socket listens"):
            assert connect(path) is None


_SERVE = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("serving", flush=True)
held = listener.accept()
sys.stdin.read()
"""


@pytest.fixture
def peer(socket_dir: Path) -> Iterator[tuple["subprocess.Popen[str]", socket.socket]]:
    """Yield a process and a socket that is connected to it."""
    command = (sys.executable, "-c", _SERVE, str(socket_dir / "s"))
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process, socket.socket(socket.AF_UNIX) as connected:
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n"
        connected.connect(str(socket_dir / "s"))
        yield process, connected
        with contextlib.suppress(ProcessLookupError):
            process.kill()


def test_a_stopped_process(peer: tuple["subprocess.Popen[str]", socket.socket]) -> None:
    process, connected = peer
    assert not sockets.is_stopped(connected)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert sockets.is_stopped(connected)
    process.send_signal(signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)
    assert not sockets.is_stopped(connected)


def test_a_process_that_is_gone(peer: tuple["subprocess.Popen[str]", socket.socket]) -> None:
    process, connected = peer
    process.kill()
    process.wait()
    assert not sockets.is_stopped(connected), "the end of the connection reports that"


def test_a_socket_without_a_process() -> None:
    with socket.socket(socket.AF_UNIX) as lonely:
        assert not sockets.is_stopped(lonely)

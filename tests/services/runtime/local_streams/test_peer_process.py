"""A stopped process is distinguished from one that runs, over the socket that connects to it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenloom.services.runtime.local_streams.peer_process import is_stopped

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
    assert not is_stopped(connected)
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert is_stopped(connected)
    process.send_signal(signal.SIGCONT)
    os.waitpid(process.pid, os.WCONTINUED)
    assert not is_stopped(connected)


def test_a_process_that_is_gone(peer: tuple["subprocess.Popen[str]", socket.socket]) -> None:
    process, connected = peer
    process.kill()
    process.wait()
    assert not is_stopped(connected), "the end of the connection reports that"


def test_a_socket_without_a_process() -> None:
    with socket.socket(socket.AF_UNIX) as lonely:
        assert not is_stopped(lonely)

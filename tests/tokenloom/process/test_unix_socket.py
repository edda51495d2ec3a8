"""Which process has the path of a unix socket."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenloom.process import unix_socket

BACKLOG = 8


@pytest.fixture
def path(socket_dir: Path) -> str:
    return str(socket_dir / "s")


def leave_behind(path: str) -> None:
    """Leave the socket of a process that was killed."""
    code = f"import os, socket; s = socket.socket(1); s.bind({path!r}); s.listen(); os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert os.path.exists(path)


def is_served_by(listener: socket.socket, path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return False
        return True


def test_the_socket_of_a_killed_process_is_replaced(path: str) -> None:
    leave_behind(path)
    with unix_socket.listen(path, BACKLOG, mode=0o600) as listener:
        assert is_served_by(listener, path)
        assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_socket_of_a_process_that_listens_is_not(path: str) -> None:
    with unix_socket.listen(path, BACKLOG) as listener:
        with pytest.raises(OSError, match="a process listens there"):
            unix_socket.listen(path, BACKLOG)
        listener.accept()[0].close()  # the question itself
        assert is_served_by(listener, path)


def test_nor_is_one_with_a_full_queue(path: str) -> None:
    with unix_socket.listen(path, 0), socket.socket(socket.AF_UNIX) as waiting:
        waiting.connect(path)
        with pytest.raises(OSError, match="a process listens there"):
            unix_socket.listen(path, BACKLOG)


def test_nor_is_another_file(path: str) -> None:
    Path(path).write_text("a text")
    with pytest.raises(OSError, match="in use"):
        unix_socket.listen(path, BACKLOG)
    assert Path(path).read_text() == "a text"


@pytest.mark.parametrize("is_left", [False, True])
def test_of_many_that_begin_at_once_one_listens(path: str, is_left: bool) -> None:
    def begin(_: int) -> socket.socket | None:
        try:
            return unix_socket.listen(path, BACKLOG)
        except OSError:
            return None

    if is_left:
        leave_behind(path)
    with ThreadPoolExecutor(8) as threads:
        (listener,) = [found for found in threads.map(begin, range(8)) if found is not None]
    with listener:
        os.set_blocking(listener.fileno(), False)
        while True:
            try:
                listener.accept()[0].close()  # the questions of the others
            except BlockingIOError:
                break
        assert is_served_by(listener, path)


def test_the_file_of_a_newer_process_stays(path: str) -> None:
    with unix_socket.listen(path, BACKLOG) as older:
        older_file = unix_socket.identity(path)
        os.unlink(path)
        with unix_socket.listen(path, BACKLOG) as newer:
            newer_file = unix_socket.identity(path)
            unix_socket.remove(path, older_file)
            assert is_served_by(newer, path)
            unix_socket.remove(path, newer_file)
            unix_socket.remove(path, newer_file)
            assert not os.path.exists(path)
        older.close()


@pytest.mark.parametrize("is_left", [False, True])
def test_the_lock_of_the_directory_is_not_awaited(path: str, is_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor holds it as long as its mesh lives."""
    monkeypatch.setattr(unix_socket.time, "sleep", lambda _: pytest.fail("the claim waits"))
    if is_left:
        leave_behind(path)
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        unix_socket.listen(path, BACKLOG).close()
    finally:
        os.close(descriptor)
    assert os.listdir(os.path.dirname(path)) == ["s"]


def test_a_lock_that_nobody_gives_back_does_not_keep_a_process_from_starting(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "_CLAIM_SECONDS", 0.02)
    with open(path + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        unix_socket.listen(path, BACKLOG).close()


@pytest.mark.parametrize("kind", ["file", "link", "directory"])
def test_what_stands_at_the_name_of_the_lock_is_no_hindrance(path: str, kind: str) -> None:
    lock = Path(path + ".lock")
    if kind == "file":  # left by a process that was killed during its claim
        lock.write_text("")
    elif kind == "link":
        lock.symlink_to(Path(path).parent / "elsewhere")
    else:
        lock.mkdir()
    unix_socket.listen(path, BACKLOG).close()
    assert lock.exists() == (kind == "directory")
    assert not (Path(path).parent / "elsewhere").exists()


def test_a_missing_directory_is_an_error(socket_dir: Path) -> None:
    with pytest.raises(FileNotFoundError):
        unix_socket.listen(str(socket_dir / "missing" / "s"), BACKLOG)

"""What a process cannot do any more once it has confined itself."""

import subprocess
import sys
from pathlib import Path

import pytest

TRIES = {
    "a socket": "import socket; socket.socket()",
    "a pair": "import socket; socket.socketpair()",
    "a program": "import os; os.execv('/bin/true', ['true'])",
    "a signal": "import os; os.kill(os.getppid(), 0)",
    "a namespace": "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
    "if libc.unshare(0x20000000): raise PermissionError(ctypes.get_errno(), 'unshare')",
}


def _run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
@pytest.mark.parametrize("what", TRIES)
def test_it_is_refused(what: str) -> None:
    confined = f"from tokenloom.process.confinement import confine\nassert confine()\n{TRIES[what]}"
    assert "PermissionError" in _run(confined)


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_it_is_refused_to_threads_that_were_there_before() -> None:
    script = (
        "import socket, threading; from tokenloom.process.confinement import confine\n"
        "confined = threading.Event()\n"
        "def open_socket():\n    confined.wait()\n    socket.socket()\n"
        "thread = threading.Thread(target=open_socket); thread.start()\n"
        "assert confine()\nconfined.set()"
    )
    assert "PermissionError" in _run(script)


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
def test_files_memory_and_threads_go_on() -> None:
    script = (
        "import threading; from pathlib import Path; from tokenloom.process.confinement import confine\n"
        "assert confine()\n"
        "thread = threading.Thread(target=lambda: print(len(bytearray(1 << 26)))); thread.start(); thread.join()\n"
        "print(Path('/proc/self/status').read_text()[:5])"
    )
    assert _run(script) == f"{1 << 26}\nName:\n"


@pytest.mark.skipif(sys.platform != "linux", reason="a filter of Linux")
@pytest.mark.parametrize("mode", ["rb", "wb"])
def test_files_are_refused_where_none_is_needed(mode: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"data")
    script = (
        "import os; from tokenloom.process.confinement import confine\n"
        f"had = os.open({str(tmp_path / 'file')!r}, os.O_RDWR)\n"
        "assert confine(opens_files=False)\n"
        "print(os.pread(had, 4, 0), os.pwrite(had, b'more', 0))\n"
        f"open({str(tmp_path / 'file')!r}, {mode!r})"
    )
    answer = _run(script)
    assert answer.startswith("b'data' 4\n")
    assert "PermissionError" in answer

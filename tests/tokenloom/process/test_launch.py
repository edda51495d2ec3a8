"""A part does not outlive the supervisor, however that ends."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tokenloom.process import launch

PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", "import os; print(os.getpid(), flush=True); os.read(0, 1)"]
subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), *command]).wait()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")


def start() -> tuple["subprocess.Popen[str]", int]:
    """A parent that launched a child: the parent, and the child's id."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(Path(launch.__file__))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_the_child_is_killed_with_its_parent() -> None:
    parent, pid = start()
    child = psutil.Process(pid)
    with parent:
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=60)[1] == [] or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", launch.__file__, "1", sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")

"""A part does not outlive the supervisor, however that ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tokenloom.supervisor import launch

PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", "import os; print(os.getpid(), os.sched_getaffinity(0), flush=True); os.read(0, 1)"]
subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], str(os.getpid()), sys.argv[2], *command]).wait()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG and affinity are Linux's")


def start(cpus: str) -> tuple["subprocess.Popen[str]", int, str]:
    """A parent that launched a child: the parent, the child's id and its affinity."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(Path(launch.__file__)), cpus],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid, _, affinity = parent.stdout.readline().strip().partition(" ")
    return parent, int(pid), affinity


def test_the_child_is_killed_with_its_parent() -> None:
    parent, pid, _ = start("")
    child = psutil.Process(pid)
    with parent:
        parent.send_signal(signal.SIGKILL)
    assert psutil.wait_procs([child], timeout=60)[1] == [] or child.status() == psutil.STATUS_ZOMBIE


def test_the_child_is_bound_to_its_cores() -> None:
    core = min(os.sched_getaffinity(0))
    parent, _, affinity = start(str(core))
    with parent:
        parent.kill()
    assert affinity == f"{{{core}}}"


def test_a_child_whose_parent_is_already_gone_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", launch.__file__, "1", "", sys.executable, "-c", "print('started')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")

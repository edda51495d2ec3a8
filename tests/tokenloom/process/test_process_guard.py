"""What a process does to its own place among others."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from tokenloom.process import process_guard

_CHILD = """
import json, os
from pathlib import Path
from tokenloom.process.process_guard import yield_processors
yield_processors()
group = Path("/proc/self/autogroup")
print(json.dumps([os.getsid(0) == os.getpid(), os.nice(0), group.read_text() if group.exists() else None]))
"""


@pytest.mark.parametrize("leads", [False, True])
def test_a_process_whose_work_takes_seconds_leaves_the_session_and_the_processors(leads: bool) -> None:
    printed = subprocess.check_output([sys.executable, "-c", _CHILD], start_new_session=leads, timeout=60)
    has_own_session, niceness, group = msgspec.json.decode(printed)
    assert has_own_session
    assert niceness == min(os.nice(0) + 10, 19)
    groups = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if groups.exists() and groups.read_text().strip() == "1" and group:
        assert group.strip().endswith("nice 10")


@pytest.mark.parametrize(
    ("raised", "num_tries"), [([], 1), ([BlockingIOError, BlockingIOError], 3), ([PermissionError], 1)]
)
def test_a_session_gets_its_low_priority_although_others_get_theirs(
    monkeypatch: pytest.MonkeyPatch, raised: list[type[OSError]], num_tries: int
) -> None:
    """Processes that start at the same time as another user than root: the kernel takes the change of one of them."""
    tries: list[str] = []

    def write(_: Path, text: str) -> None:
        tries.append(text)
        if raised:
            raise raised.pop(0)

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(os, "setsid", lambda: None)
    monkeypatch.setattr(os, "nice", lambda _: None)
    process_guard.yield_processors()
    assert tries == ["10"] * num_tries


def test_a_process_is_about_to_end_from_its_kill_on_until_it_is_forgotten() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    with process:
        assert not process_guard.is_ending(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert process_guard.is_ending(process.pid)
    assert process_guard.is_ending(process.pid), "its state is not known any more"

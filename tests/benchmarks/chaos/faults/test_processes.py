"""What ``/proc`` says of processes."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from benchmarks.chaos.faults import processes

SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)", "some.module_main")


async def test_signals_are_seen_to_take_effect() -> None:
    process = await asyncio.create_subprocess_exec(*SLEEPER)
    try:
        assert await processes.until(lambda: processes.running_module(os.getpid(), "module_main") == [process.pid], 10)
        assert processes.state(process.pid) not in ("T", None)
        assert processes.send_signal(process.pid, signal.SIGSTOP)
        assert await processes.until(lambda: processes.state(process.pid) == "T", 10)
    finally:
        process.kill()
    assert await processes.until(lambda: processes.state(process.pid) is None, 10)
    await process.wait()
    assert not processes.send_signal(process.pid, signal.SIGCONT)
    assert processes.command(process.pid) == []


def test_a_zombie_is_gone(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    stat = tmp_path / "7" / "stat"
    for letter, state in (("S", "S"), ("T", "T"), ("Z", None), ("X", None)):
        stat.write_text(f"7 (a) name) {letter} 1 7")
        assert processes.state(7, tmp_path) == state


def test_descendants_are_found_below_every_thread(tmp_path: Path) -> None:
    for pid, thread, children in ((1, 1, "2 "), (1, 9, "3"), (2, 2, "4 5"), (3, 3, ""), (4, 4, ""), (5, 5, "")):
        folder = tmp_path / str(pid) / "task" / str(thread)
        folder.mkdir(parents=True)
        (folder / "children").write_text(children)
    assert sorted(processes.descendants(1, tmp_path)) == [2, 3, 4, 5]


async def test_a_condition_that_never_holds() -> None:
    assert not await processes.until(lambda: False, 0.0)

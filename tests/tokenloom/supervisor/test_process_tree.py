"""Every process of a mesh has a name."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from tokenloom.supervisor.process_tree import memory, processes_of
from tokenloom.supervisor.state_dir import MeshRecord, PartRecord, PartReport

SLEEP = "import time; time.sleep(600)"
PART = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}, 'a.core_main']).wait()"


async def test_parts_and_what_they_have_started(tmp_path: Path) -> None:
    part = await asyncio.create_subprocess_exec(sys.executable, "-c", PART)
    report = PartReport(part.pid, "unix:/a", None, None, "unix:/h")
    (tmp_path / "state").write_bytes(msgspec.json.encode(report))
    mesh = MeshRecord(os.getpid(), 1, [PartRecord("engine", 0, "both", str(tmp_path / "state"))])
    try:
        found: list[tuple[str, int]] = []
        async with asyncio.timeout(30):
            while ("core", 2) not in found:
                found = [(process.name, process.depth) for process in processes_of(mesh)]
                await asyncio.sleep(0)
        assert found[0] == ("supervisor", 0)
        own = next(process for process in processes_of(mesh) if process.pid == part.pid)
        assert own.memory in range(1 << 20, 1 << 30)
        assert found[found.index(("engine-0", 1)) + 1] == ("core", 2)
    finally:
        for process in processes_of(mesh):
            if process.depth:
                os.kill(process.pid, 9)
        await part.wait()


def test_the_memory_of_a_process_that_has_ended_or_shows_none_is_not_known(tmp_path: Path) -> None:
    assert memory(1, tmp_path) is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "smaps_rollup").write_text("5000-6000 ---p 00000000 00:00 0 [rollup]\nRss: 8 kB\n")
    assert memory(1, tmp_path) is None
    (tmp_path / "1" / "smaps_rollup").write_text("5000-6000 ---p 00000000 00:00 0 [rollup]\nRss: 8 kB\nPss: 3 kB\n")
    assert memory(1, tmp_path) == 3072

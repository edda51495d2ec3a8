"""Every process of a mesh has a name."""

import asyncio
import os
import sys
from pathlib import Path

import msgspec

from tokenloom.supervisor.process_tree import processes_of
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
        assert found[found.index(("engine-0", 1)) + 1] == ("core", 2)
    finally:
        for process in processes_of(mesh):
            if process.depth:
                os.kill(process.pid, 9)
        await part.wait()

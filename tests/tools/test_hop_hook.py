"""What the hook records in a process of its own."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.figures import hop_hook

_PROGRAM = """
import asyncio, pathlib, sys
from shop.work import serve
meeting = pathlib.Path(sys.argv[1])
asyncio.run(serve(meeting))
"""
_WORK = """
import asyncio

def add(a, b):
    return a + b

async def wait_twice():
    await asyncio.sleep(0)
    await asyncio.sleep(0)

async def serve(meeting):
    add(0, 0)
    while not list(meeting.glob("*.on")):
        await asyncio.sleep(0.01)
    add(1, 2)
    await wait_twice()
    (meeting / "dump").touch()
    while not list(meeting.glob("*.json")):
        await asyncio.sleep(0.01)
"""


@pytest.fixture
def dump(tmp_path: Path) -> Any:
    """What a program of two functions left."""
    hook, tree, meeting = tmp_path / "hook", tmp_path / "tree", tmp_path / "meeting"
    for folder in (hook, tree / "shop", meeting):
        folder.mkdir(parents=True)
    (hook / "sitecustomize.py").write_text(Path(hop_hook.__file__).read_text())
    (tree / "shop" / "work.py").write_text(_WORK)
    (meeting / "on").touch()
    added = {"PYTHONPATH": f"{hook}:{tree}", "HOUSE_HOPS": str(meeting), "HOUSE_TREE": str(tree)}
    started = time.monotonic_ns()
    subprocess.run([sys.executable, "-c", _PROGRAM, meeting], env={**os.environ, **added}, check=True, timeout=60)
    [written] = meeting.glob("*.json")
    assert [path.suffix for path in meeting.glob(f"{written.stem}.*")].count(".ready") == 1
    found = json.loads(written.read_text())
    assert all(started < moment < time.monotonic_ns() for moment, _, _ in found["calls"])
    return found


def test_calls_and_continuations_of_the_tree_are_recorded(dump: Any) -> None:
    names = [name for _, name, _ in dump["functions"]]
    calls = [(names[index], resumed) for _, index, resumed in dump["calls"]]
    assert ("add", False) in calls
    assert [resumed for name, resumed in calls if name == "wait_twice"] == [False, True, True]
    assert {Path(file).name for file, _, _ in dump["functions"]} == {"work.py"}

"""Two processes of engines that share a folder; one is killed while it writes a block."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.kv_transfer.offloading_core import expected, prompt_of
from tests.engine_core.kv_transfer.storing_core import BLOCK_BYTES, BLOCK_SIZE
from tokenloom.engine_core.kv_transfer.block_store import HEAD_BYTES, FolderStore

ROOT = Path(__file__).parents[3]
PROMPTS = [prompt_of(seed, 30) for seed in range(4)]
NUM_BLOCKS = (len(PROMPTS[0]) - 1) // BLOCK_SIZE
VALUE_BYTES = BLOCK_BYTES + HEAD_BYTES


class EngineProcess:
    """An engine's core in a process of its own, which runs the prompts that it is told."""

    def __init__(self, folder: Path, store_bytes: int, *, stops_in_write: int = 0) -> None:
        """``stops_in_write``: the number of the write in the middle of which it stops for ever; 0: none."""
        arguments = [folder.as_uri(), str(store_bytes), str(stops_in_write)]
        command = [sys.executable, "-m", "tests.engine_core.kv_transfer.storing_process", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
        )

    def run(self, *prompts: list[int]) -> dict[str, Any]:
        """Tokens, and how many blocks were loaded and saved so far."""
        self.ask(*prompts)
        return self.answer()

    def ask(self, *prompts: list[int]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(prompts) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=30)


@pytest.fixture
def engines() -> Iterator[list[EngineProcess]]:
    engines: list[EngineProcess] = []
    yield engines
    for engine in engines:
        engine.close()


def names(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()} - {""}


def total(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.name != "ledger")


def test_an_engine_that_is_killed_in_a_write_leaves_nothing_behind(
    tmp_path: Path, engines: list[EngineProcess]
) -> None:
    folder, capacity = tmp_path / "kv", 16 * VALUE_BYTES
    killed, other = EngineProcess(folder, capacity, stops_in_write=4), EngineProcess(folder, capacity)
    engines += killed, other
    killed.ask(PROMPTS[0])
    assert killed.answer() == {"stopped": 4}
    assert names(folder) == {".kv", ".part"}
    found = other.run(PROMPTS[0])
    assert found["tokens"] == [expected(PROMPTS[0])]
    assert found["loaded"] == 3, "what was whole is used, what is being written is not"
    killed.process.send_signal(signal.SIGKILL)
    killed.process.wait(30)
    assert ".part" in names(folder), "as a crash leaves it"
    third = EngineProcess(folder, capacity)
    engines.append(third)
    found = third.run(PROMPTS[0], PROMPTS[1])
    assert found["tokens"] == [expected(prompt) for prompt in PROMPTS[:2]]
    assert names(folder) == {".kv"}
    assert total(folder) <= capacity
    store = FolderStore(folder, capacity, 0.0)  # no lock is left: it gets the ledger at once
    with store._locked():
        assert store._total() == total(folder)
    store.close()


def test_two_engines_together_keep_to_one_total(tmp_path: Path, engines: list[EngineProcess]) -> None:
    folder, capacity = tmp_path / "kv", 12 * VALUE_BYTES
    engines += [EngineProcess(folder, capacity) for _ in range(2)]
    for _ in range(2):
        for engine in engines:
            engine.ask(*PROMPTS)
        for engine in engines:
            assert engine.answer()["tokens"] == [expected(prompt) for prompt in PROMPTS]
        assert total(folder) <= capacity


def test_there_is_no_double_work(tmp_path: Path, engines: list[EngineProcess]) -> None:
    folder, capacity = tmp_path / "kv", 1 << 20
    engines += [EngineProcess(folder, capacity) for _ in range(2)]
    for engine in engines:
        engine.ask(PROMPTS[0])  # both at once
    answers = [engine.answer() for engine in engines]
    blocks = len(list(folder.glob("*.kv")))
    assert sum(answer["saved"] for answer in answers) == blocks >= NUM_BLOCKS

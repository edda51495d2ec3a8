"""A bit flips in the weights of an engine that serves: the engine leaves, and its requests go on elsewhere."""

import asyncio
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.mesh.asking import Answer, ask
from tests.mesh.harness import SOON, Mesh
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.request.errors import Unavailable

ENGINE: dict[str, Any] = {
    "worker": "model",
    "dtype": "float32",
    "weights_scrub_seconds": 0.5,
    "num_threads": 1,
    "num_kv_blocks": 128,
    "enable_prefix_caching": False,
}
UNUSED = 1999
"""A token that no prompt and no answer has: answers stay the same though its embedding is damaged."""


def flip(pid: int, row: bytes) -> int:
    """Flip a bit in the middle of each place of a process's memory that holds ``row``. Returns how many there are."""
    places = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        for begin, content in _written(pid, memory.fileno()):
            at = content.find(row)
            while at >= 0:
                middle = at + len(row) // 2
                os.pwrite(memory.fileno(), bytes([content[middle] ^ 1]), begin + middle)
                places += 1
                at = content.find(row, at + 1)
    return places


def _written(pid: int, memory: int) -> Iterator[tuple[int, bytes]]:
    """Yield the private memory of a process that is no file's, by its addresses."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, modes, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) for address in span.split("-"))
        if modes.startswith("rw") and inode == "0" and end - begin < 1 << 29:
            try:
                yield begin, os.pread(memory, end - begin, begin)
            except OSError:  # memory of the kernel's own
                continue


def embedding_of(token: int) -> bytes:
    weights = load_file(DEMO_MODEL / "model.safetensors")
    found: np.ndarray[Any, np.dtype[np.float32]] = weights["model.embed_tokens.weight"][token].to(torch.float32).numpy()
    return found.tobytes()


@pytest.mark.parametrize("is_busy", [True, False])
async def test_requests_go_on_with_the_same_tokens_and_operators_see_why(socket_dir: Path, is_busy: bool) -> None:
    metrics = {"metrics_listen": "127.0.0.1:0"}
    async with Mesh(socket_dir, engines=2, engine=ENGINE, common=metrics).running() as mesh, mesh.http() as http:
        prompt = mesh.encode("The keeper of the lighthouse")
        expected = await ask(http, prompt, 200)
        assert UNUSED not in [*prompt, *expected.token_ids]
        victim = mesh.engines[0]
        assert victim.host is not None
        row = embedding_of(UNUSED)
        answers = [Answer() for _ in range(8 if is_busy else 0)]
        asking = [asyncio.create_task(ask(http, prompt, 200, answer)) for answer in answers]
        for answer in answers:
            await answer.begun.wait()
        assert await asyncio.to_thread(flip, victim.core_pid(), row)
        async with asyncio.timeout(SOON):
            while not victim.host.failure.happened:
                if is_busy:  # an idle engine is asked for its health every ten seconds
                    assert (await ask(http, prompt, 200)).token_ids == expected.token_ids
                else:
                    await asyncio.sleep(0.05)
        for task in asking:
            assert (await task).token_ids == expected.token_ids
        assert isinstance(await victim.host.failure.take(), Unavailable)
        assert (await ask(http, prompt, 200)).token_ids == expected.token_ids, "at the other engine"
        health = (await http.get("/health")).json()
        assert [each["kind"] for each in health["fall_backs"]] == ["damaged_weights"]
        await victim.stop()
        await victim.start()
        assert (await ask(http, prompt, 200)).token_ids == expected.token_ids
        assert mesh.coordinator.host is not None
        (shown,) = [each for each in mesh.coordinator.host.fall_backs.active if each.kind == "damaged_weights"]
        assert shown.subject == "engine-0"
        assert "model._embedding have changed since they were loaded" in shown.detail
        page = await asyncio.to_thread(_metrics_of, mesh.coordinator.host.metrics_address)
        assert "tokenloom_engine_weights_damaged_total 1.0" in page.splitlines()


def _metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics") as page:
        return str(page.read().decode())

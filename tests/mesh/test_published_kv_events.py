"""A router of others reads what the engine of a mesh has cached; tenants do not learn of each other."""

import asyncio
import hashlib
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.asking import ask
from tests.mesh.harness import SOON, Mesh
from tokenloom.services.runtime.telemetry import kv_events
from tokenloom.services.runtime.telemetry.kv_events import KVEventReader, KVEventSource, RemovedBlocks, StoredBlocks

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = list(range(3, 60))
NAMES = ("one", "two")
"""The tenants. Each one's key is its name."""


@pytest.fixture(scope="module")
def mesh_options(mesh_dir: Path) -> dict[str, Any]:
    endpoints = f'"endpoint": "ipc://{mesh_dir}/kv", "replay_endpoint": "ipc://{mesh_dir}/kv-replay"'
    config = f'{{"enable_kv_cache_events": true, "token_ids": true, {endpoints}}}'
    keys = mesh_dir / "keys.toml"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in NAMES}
    keys.write_text("".join(f'[[tenant]]\nname = "{each}"\nkey_sha256 = ["{digests[each]}"]\n' for each in NAMES))
    gateway = {"api_key_file": keys, "cache_salt_secret": "s" * 32}
    return {"engine": {"kv_events_config": config, "num_kv_blocks": 16, "block_size": 16}, "gateway": gateway}


async def test_blocks_are_published_when_they_are_stored_and_removed(
    mesh: Mesh, mesh_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "IDLE_SECONDS", 0.05)
    reader = KVEventReader(KVEventSource(f"ipc://{mesh_dir}/kv", f"ipc://{mesh_dir}/kv-replay"))
    names = {}
    stored: dict[Any, list[int]] = {}
    removed: set[Any] = set()
    async with asyncio.timeout(SOON), aclosing(reader.read()) as stream:
        for key in NAMES:
            before = set(stored)
            async with mesh.http(headers={"authorization": f"Bearer {key}"}) as http:
                await ask(http, PROMPT, 4)
            while len(set(stored) - before) < len(PROMPT) // 16:
                await _take(stream, stored, removed)
            names[key] = set(stored) - before
        first, second = names.values()
        assert not first & second, "the salt of the tenant is part of every hash"
        assert {tuple(stored[each]) for each in first} == {tuple(stored[each]) for each in second}
        assert tuple(PROMPT[:16]) in {tuple(ids) for ids in stored.values()}
        async with mesh.http(headers={"authorization": "Bearer one"}) as http:
            for at in range(6):  # more than the pool holds
                await ask(http, [60 + at, *PROMPT], 4)
        while not removed & first:
            await _take(stream, stored, removed)
    assert (reader.num_lost, reader.num_wrong) == (0, 0)


async def _take(stream: Any, stored: dict[Any, list[int]], removed: set[Any]) -> None:
    _, batch = await anext(stream)
    for event in batch.events:
        if isinstance(event, StoredBlocks):
            size = event.block_size
            for at, block in enumerate(event.block_hashes):
                stored[block] = event.token_ids[at * size : (at + 1) * size]
        elif isinstance(event, RemovedBlocks):
            removed.update(event.block_hashes)

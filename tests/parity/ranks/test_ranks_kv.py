"""Prefill and decode apart, on engines of one rank or several: every rank gets the part of a block that it keeps."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.gpu_worker.kv_connector.engine_pair import MAKE, Engine, MakeExecutor, Pair, tier, uni
from tests.gpu_worker.parallel.rank_threads import parallel
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVAcquire
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.engine_core.kv_transfer.kv_transport import KVPool
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.gpu_worker.kv_connector import nixl
from tokenloom.services.engine.core.workers import WORKER_COMMAND

GREEDY = CoreSamplingParams(max_tokens=12, seed=3, temperature=0.0)
PROMPT = [(i * i * 7) % 400 + 5 for i in range(100)]
NUM_BLOCKS = 7
"""Of the prompt."""


def of(*shape: int) -> MakeExecutor:
    """Ranks in processes of their own: tensor, pipeline and context parallel."""

    def make(config: EngineConfig) -> Executor:
        return MultiprocExecutor(replace(config, parallel=parallel(*shape)), WORKER_COMMAND)

    return uni if shape == (1,) else make


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    engine = Engine([])
    yield engine
    engine.core.shutdown()


@pytest.fixture(scope="module")
def expected(alone: Engine) -> list[int]:
    alone.add("a", PROMPT, GREEDY)
    return [token for output in alone.run("a") for token in output.new_token_ids]


def pool_of(engine: Engine) -> KVPool:
    return engine.core.executor.kv_pool()


def rows_of(pool: KVPool, region: int) -> set[bytes]:
    """What lies in the slots of one region that are in use."""
    rows = pool.views[region].reshape(-1, 64 * 4)
    return {row.tobytes() for row in rows if row.any()}


NEEDS_NIXL = pytest.mark.skipif(not nixl.is_available(), reason="no nixl")
SHAPES: list[Any] = [
    ("unix", (2,), (2,)),
    ("shm", (2, 1, 2), (2, 1, 2)),
    ("shm", (1,), (2, 1, 2)),
    ("tcp", (2, 1, 2), (1,)),
    ("unix", (2,), (2, 1, 2)),
    ("shm", (1, 2), (2,)),
    pytest.param("nixl", (1,), (2, 1, 2), marks=NEEDS_NIXL),
]


@pytest.mark.parametrize(("transport", "prefill", "decode"), SHAPES)
def test_every_rank_gets_its_part(
    transport: str, prefill: tuple[int, ...], decode: tuple[int, ...], expected: list[int]
) -> None:
    pair = Pair(MAKE[transport], of(*prefill), of(*decode))
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats, pool = pair.decode.core.scheduler.stats(), pool_of(pair.decode)
    name = {"unix": "socket", "tcp": "socket"}.get(transport, transport)
    assert stats.kv_bytes_received == {name: NUM_BLOCKS * pool.block_bytes}
    assert stats.kv_blocks_received == NUM_BLOCKS
    assert stats.kv_recomputes == {}
    assert pair.prefill.core.ready.kv_layout == pair.decode.core.ready.kv_layout == "HND/fp32/4x2x64/16"
    pair.close()


def test_two_ranks_hold_different_tokens(expected: list[int]) -> None:
    pair = Pair(MAKE["shm"], of(1), of(2, 1, 2))
    assert pair.ask("a", PROMPT, GREEDY) == expected
    theirs, ours = pool_of(pair.prefill), pool_of(pair.decode)
    assert ours.block_bytes == theirs.block_bytes, "each rank has half of the tokens"
    whole = rows_of(theirs, 0)
    first, second = rows_of(ours, 0), rows_of(ours, len(ours.regions) // 2)
    assert first.isdisjoint(second)
    assert whole <= first | second
    assert len(whole & first) == 2 * 52, "tokens 0 to 7 of each block, and the last 4 of the prompt"
    assert len(whole & second) == 2 * 48
    pair.close()


def test_8_bits_and_their_scales_are_divided_too() -> None:
    engine = Engine([], kv_cache_dtype="int8")
    engine.add("a", PROMPT, GREEDY)
    tokens = [token for output in engine.run("a") for token in output.new_token_ids]
    pair = Pair(MAKE["shm"], of(1), of(2, 1, 2), kv_cache_dtype="int8")
    assert pair.ask("a", PROMPT, GREEDY) == tokens
    stats = pair.decode.core.scheduler.stats()
    assert (stats.kv_blocks_received, stats.kv_recomputes) == (NUM_BLOCKS, {})
    pair.close()
    engine.core.shutdown()


def test_a_copy_that_is_torn_on_the_way_to_its_ranks_is_noticed(expected: list[int]) -> None:
    pair = Pair(MAKE["shm"], of(1), of(2, 1, 2), failpoints=("torn_copy=1",))
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats = pair.decode.core.scheduler.stats()
    assert stats.kv_recomputes == {"checksum": 1}
    pair.close()


def test_other_numbers_are_refused_by_name(alone: Engine) -> None:
    pair = Pair(MAKE["unix"], of(2, 1, 2), of(1))
    digest = prompt_digest(PROMPT, b"")
    pair.prefill.add("b", PROMPT, GREEDY, lease_id=b"b")
    pair.prefill.run("b")
    answer = pair.prefill.answer(KVAcquire(1, b"b", "HND/int8+fp32/4x2x64/16", digest, [pair.prefill.transport]))
    assert answer.target is None, "another layout was accepted"
    assert answer.failure == "layout"
    assert "layout is HND/fp32/4x2x64/16, the reader's is HND/int8+fp32/4x2x64/16" in answer.detail
    pair.close()


@pytest.mark.parametrize("label", ["offload", "folder"])
def test_a_file_keeps_the_part_of_every_rank(tmp_path: Path, alone: Engine, label: str) -> None:
    """Prompts evict each other from a small pool, and come back from the file."""
    engine = Engine([], of(2, 1, 2), num_blocks=40, **tier(label, tmp_path))
    prompts = [[(i * i * 7 + number) % 400 + 5 for i in range(300)] for number in range(4)]
    for turn in range(2):
        for number, prompt in enumerate(prompts):
            found = []
            for each in (alone, engine):
                each.core.reset_prefix_cache() if each is alone else None
                each.add(f"{turn}-{number}", prompt, GREEDY)
                found.append([token for output in each.run(f"{turn}-{number}") for token in output.new_token_ids])
            assert found[0] == found[1]
    stats = engine.core.scheduler.stats()
    assert stats.kv_bytes_received[label] > 0
    assert stats.kv_bytes_received[label] % pool_of(engine).block_bytes == 0, "each block is there whole"
    assert stats.kv_recomputes == {}
    first, second = (rows_of(pool_of(engine), region) for region in (0, len(pool_of(engine).regions) // 2))
    assert first.isdisjoint(second)
    engine.core.shutdown()


def test_a_dead_owner_costs_a_recompute(expected: list[int]) -> None:
    pair = Pair(MAKE["unix"], of(2, 1, 2), of(1))
    pair.prefill.add("a", PROMPT, GREEDY, lease_id=b"a")
    (output,) = pair.prefill.run("a")
    layout, digest = pair.decode.core.ready.kv_layout, prompt_digest(PROMPT, b"")
    answer = pair.prefill.answer(KVAcquire(1, b"a", layout, digest, [pair.prefill.transport]))
    executor = pair.prefill.core.executor
    assert isinstance(executor, MultiprocExecutor)
    for worker in executor.workers:
        os.kill(worker.pid, signal.SIGKILL)
    pair.prefill.core.shutdown()
    accepted = output.new_token_ids
    pair.decode.add("a", PROMPT, GREEDY, accepted_token_ids=accepted, remote_kv=answer.target)
    outputs = pair.decode.run("a", lambda: pair.decode.service.run() and None)  # type: ignore[union-attr]
    assert accepted + [token for each in outputs for token in each.new_token_ids] == expected
    assert pair.decode.core.scheduler.stats().kv_recomputes == {"transport": 1}
    pair.decode.core.shutdown()

"""Prefill and decode apart, each engine with two ranks: every rank's part of a block moves, or none counts."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from tests.gpu_worker.kv_connector.engine_pair import MAKE, Pair
from tests.gpu_worker.parallel.rank_threads import parallel
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_messages import KVAcquire
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.engine_core.kv_transfer.leases import prompt_digest
from tokenloom.services.engine.core.workers import WORKER_COMMAND

GREEDY = CoreSamplingParams(max_tokens=12, seed=3, temperature=0.0)
PROMPT = [(i * i * 7) % 400 + 5 for i in range(100)]


def of_two(config: EngineConfig) -> Executor:
    return MultiprocExecutor(replace(config, parallel=parallel(2)), WORKER_COMMAND)


@pytest.fixture
def alone() -> Iterator[Pair]:
    pair = Pair(MAKE["shm"])
    yield pair
    pair.close()


def test_the_parts_of_both_ranks_move(alone: Pair) -> None:
    expected = alone.ask("a", PROMPT, GREEDY)
    pair = Pair(MAKE["unix"], of_two, of_two)
    assert pair.ask("a", PROMPT, GREEDY) == expected
    stats, pool = pair.decode.core.scheduler.stats(), pair.decode.core.executor.kv_pool()
    assert pool.block_bytes == alone.decode.core.executor.kv_pool().block_bytes, "each rank has half of the heads"
    assert stats.kv_bytes_received == {"socket": 7 * pool.block_bytes}
    assert stats.kv_recomputes == {}
    digest = prompt_digest(PROMPT, b"")
    pair.prefill.add("b", PROMPT, GREEDY, lease_id=b"b")
    pair.prefill.run("b")
    theirs = alone.decode.core.ready.kv_layout
    answer = pair.prefill.answer(KVAcquire(1, b"b", theirs, digest, [pair.prefill.transport]))
    assert answer.target is None, "another layout was accepted"
    assert answer.failure == "layout"
    assert f"layout is {pair.prefill.core.ready.kv_layout}, the reader's is {theirs}" in answer.detail
    pair.close()

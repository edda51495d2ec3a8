"""KV moves between engines whose workers run in processes of their own, over all ranks."""

import functools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_worker.kv_connector.engine_pair import MAKE, Engine, Pair, mp, uni
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.errors import ExecutorFailedError
from tokenloom.engine_core.data.messages import FinishReason
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.engine_core.fake_workers.hash_worker import expected_tokens

GREEDY = CoreSamplingParams(max_tokens=12, seed=3, temperature=0.0)
PROMPT = [(i * i * 7) % 400 + 5 for i in range(100)]


@pytest.fixture(params=[1, 2])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """``params``: the ranks of each engine."""
    make = functools.partial(mp, world_size=request.param)
    pair = Pair(MAKE["shm"], make, make, worker="hash")
    yield pair
    pair.close()


def expected(engine: Engine, prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, vocab_size=engine.core.ready.vocab_size)


def test_the_blocks_of_every_rank_move(pair: Pair) -> None:
    assert pair.ask("a", PROMPT, GREEDY) == expected(pair.decode, PROMPT, 12)
    stats = pair.decode.core.scheduler.stats()
    pool = pair.decode.core.executor.kv_pool()
    assert stats.kv_bytes_received == {"shm": 7 * pool.block_bytes}
    assert stats.kv_recomputes == {}
    assert (pool.views[0] != 255).any(), "the hash worker fills its pool with -1 first"
    assert all(np.array_equal(pool.views[0], view) for view in pool.views), "all ranks compute the same here"


def test_engines_of_another_number_of_ranks_differ_in_layout() -> None:
    pair = Pair(MAKE["shm"], functools.partial(mp, world_size=2), uni, worker="hash")
    layouts = [engine.core.ready.kv_layout for engine in (pair.prefill, pair.decode)]
    assert layouts[0] == f"{layouts[1]}+{layouts[1]}"
    pair.close()


def test_sleep_releases_the_pool_and_later_requests_move_again(pair: Pair) -> None:
    assert pair.ask("a", PROMPT, GREEDY) == expected(pair.decode, PROMPT, 12)
    for engine in (pair.prefill, pair.decode):
        asleep = engine.core.sleeping.sleep(1)
        while engine.core.has_work():
            engine.core.step()
        asleep.result(0)
        assert not np.frombuffer(engine.core.executor.kv_pool().memory.buffer, dtype=np.uint8).any()
        engine.core.sleeping.wake_up()
    assert pair.ask("b", PROMPT[:50], GREEDY) == expected(pair.decode, PROMPT[:50], 12)


def test_a_killed_worker_fails_its_engine_alone(pair: Pair) -> None:
    executor = pair.prefill.core.executor
    assert isinstance(executor, MultiprocExecutor)
    failed = threading.Event()
    executor.on_failure(failed.set)
    pair.prefill.add("a", PROMPT, GREEDY, lease_id=b"a")
    (output,) = pair.prefill.run("a")
    assert output.finish_reason is FinishReason.PREFILLED
    os.kill(executor.workers[-1].pid, signal.SIGKILL)
    assert failed.wait(60)
    pair.prefill.add("b", PROMPT[:20], GREEDY)
    with pytest.raises(ExecutorFailedError, match="ended with status -9"):
        pair.prefill.core.step()
    pair.decode.add("c", PROMPT, GREEDY)
    tokens = [token for output in pair.decode.run("c") for token in output.new_token_ids]
    assert tokens == expected(pair.decode, PROMPT, 12)


def test_evicted_blocks_of_every_rank_come_back_from_the_file(tmp_path: Path) -> None:
    executor = functools.partial(mp, world_size=2)
    engine = Engine([], executor, worker="hash", offload_path=str(tmp_path), offload_bytes=4 << 20)
    for name, length in (("a", 400), ("b", 1800), ("c", 400)):
        prompt = [(length + i * i * 7) % 400 + 5 for i in range(length)]
        engine.add(name, prompt, GREEDY)
        tokens = [token for output in engine.run(name) for token in output.new_token_ids]
        assert tokens == expected(engine, prompt, 12)
    assert engine.core.scheduler.stats().kv_bytes_received["offload"] > 0
    pool = engine.core.executor.kv_pool()
    assert np.array_equal(pool.views[0], pool.views[1])
    engine.core.shutdown()

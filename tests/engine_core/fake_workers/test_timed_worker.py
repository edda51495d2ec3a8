"""Tests that the worker that only waits follows the scheduler."""

import time

import msgspec
import pytest

from tests.engine_core.helpers import make_config
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.timed_worker import TimedWorker


def run(core: EngineCore, requests: int, prompt_len: int = 6, max_tokens: int = 5) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {str(index): [] for index in range(requests)}
    for index in range(requests):
        sampling = CoreSamplingParams(max_tokens=max_tokens, seed=0)
        core.add_request(EngineCoreRequest(str(index), [index + 1] * prompt_len, sampling))
    while core.has_work():
        for output in core.step().outputs:
            tokens[output.request_id] += output.new_token_ids
    return tokens


@pytest.mark.parametrize("num_blocks", [64, 6])
@pytest.mark.parametrize("budget", [64, 8])
def test_every_request_gets_its_tokens_also_in_chunks_and_after_preemption(num_blocks: int, budget: int) -> None:
    config = make_config(num_blocks=num_blocks, budget=budget, max_num_seqs=4)
    core = EngineCore(config, UniProcExecutor(TimedWorker(config)))
    tokens = run(core, 6)
    assert [len(each) for each in tokens.values()] == [5] * 6
    assert len({tuple(each) for each in tokens.values()}) == 1
    assert len(set(tokens["0"])) == 5
    assert (core.scheduler.stats().num_preemptions > 0) == (num_blocks == 6)


def test_a_step_takes_its_time() -> None:
    config = make_config()
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, step_seconds=0.02))
    core = EngineCore(config, UniProcExecutor(TimedWorker(config)))
    started = time.perf_counter()
    run(core, 2, max_tokens=3)
    assert time.perf_counter() - started >= 0.06


def test_every_token_of_a_step_takes_its_time() -> None:
    config = make_config(budget=64)
    config = msgspec.structs.replace(config, worker=msgspec.structs.replace(config.worker, token_seconds=0.001))
    core = EngineCore(config, UniProcExecutor(TimedWorker(config)))
    started = time.perf_counter()
    run(core, 1, prompt_len=48, max_tokens=1)
    assert time.perf_counter() - started >= 0.048

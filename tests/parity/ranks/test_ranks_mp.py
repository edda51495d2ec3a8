"""Ranks in processes of their own: the tokens of one process, also after a rank was killed."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.gpu_worker.parallel.rank_threads import parallel
from tests.parity.engine import Engine
from tests.parity.reference import SMALL_CONFIGS, save_random
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.errors import WorkerLostError
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.executor import Executor
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.multiproc import MultiprocExecutor
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.services.engine.core.workers import WORKER_COMMAND, make_worker

LIMITS = [12] * 3


def in_processes(config: EngineConfig) -> Executor:
    return make_executor(config, make_worker, WORKER_COMMAND)


@pytest.mark.parametrize(("name", "shape"), [("qwen3_moe", (2, 2)), ("llama", (2, 1, 2))])
def test_processes_give_the_tokens_of_one(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    path = save_random(name, tmp_path, **SMALL_CONFIGS[name])
    generator = np.random.default_rng(5)
    prompts = [generator.integers(3, 503, length).tolist() for length in (1, 17, 70)]
    alone = Engine(path, num_blocks=60)
    expected = alone.generate(prompts, LIMITS)
    engine = Engine(path, num_blocks=60, parallel=parallel(*shape), executor=in_processes)
    assert engine.generate(prompts, LIMITS) == expected
    drawn = {"temperature": 1.0, "top_p": 0.9}
    assert engine.generate(prompts, LIMITS, **drawn) == alone.generate(prompts, LIMITS, **drawn)
    executor = engine.core.executor
    assert isinstance(executor, MultiprocExecutor)
    assert executor._rendezvous is None, "the workers have met, so that nothing is left if all are killed now"
    lost, killed_at = threading.Event(), time.monotonic()
    executor.on_failure(lost.set)
    os.kill(executor.workers[0].pid, signal.SIGKILL)
    assert lost.wait(3.0)
    with pytest.raises(WorkerLostError, match="worker 0 ended with status -9"):
        executor.collective_rpc("check_health")
    assert time.monotonic() - killed_at < 3.0
    engine.core.replace_workers()
    assert engine.generate(prompts, LIMITS) == expected
    engine.core.shutdown()


def test_a_rank_lost_in_a_recorded_step_ends_it() -> None:
    """The other rank waits for its sum in a kernel, without the interpreter."""
    engine = Engine(DEMO_MODEL, num_blocks=60, dtype="bfloat16", parallel=parallel(2), executor=in_processes)
    executor, core = engine.core.executor, engine.core
    assert isinstance(executor, MultiprocExecutor)
    params = CoreSamplingParams(max_tokens=200, seed=0, temperature=0.0)
    core.add_request(EngineCoreRequest("a", [5, 6, 7], params))
    for _ in range(5):
        core.step()
    os.kill(executor.workers[1].pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        step = thread.submit(core.step)
        with pytest.raises(TimeoutError):
            step.result(0.2)
        killed_at = time.monotonic()
        os.kill(executor.workers[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError, match="worker 1 ended with status -9"):
            step.result(3.0)
    assert time.monotonic() - killed_at < 3.0
    core.shutdown()

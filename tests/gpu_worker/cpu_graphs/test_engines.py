"""Engines give the same tokens from recordings as without: under preemption, aborts, drafts, sleep and new weights."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tokenloom import demo_model
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculativeConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.devices import CPUWorker
from tokenloom.gpu_worker.model_worker import ModelWorker

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

DEMO_MODEL = str(Path(demo_model.__file__).parent)
DRAFTS = SpeculativeConfig("draft_model", 3, str(Path(DEMO_MODEL, "draft")))
ALIKE = [(i * 7) % 500 + 5 for i in range(140)]
"""A prompt that several requests share, so that attention reads its blocks once for all."""


def make_core(*, eager: bool, speculative: SpeculativeConfig | None = None, kv: str = "auto") -> EngineCore:
    """An engine whose blocks do not suffice for all requests at once."""
    cache: Any = {"dtype": kv, "num_blocks": 22}
    config = EngineConfig(
        worker=WorkerConfig(model=DEMO_MODEL, num_threads=1, enforce_eager=eager),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128),
        max_model_len=256,
        speculative=speculative,
    )
    core = EngineCore(config, UniProcExecutor(CPUWorker(config)))
    if core.scheduler.drafts is not None:
        core.scheduler.drafts.free_rows = None  # also on a busy machine, on which no row looks free
    return core


def worker_of(core: EngineCore) -> ModelWorker:
    assert isinstance(core.executor, UniProcExecutor)
    worker = core.executor._worker
    assert isinstance(worker, ModelWorker)
    return worker


def num_recordings(core: EngineCore) -> int:
    runner = worker_of(core)._runner
    assert runner is not None
    return 0 if runner._recordings is None else runner._recordings.num_recordings


def generate(core: EngineCore, name: str = "") -> dict[str, list[int]]:
    """Tokens of ten requests, of which one is aborted, and how often any was preempted."""
    for index in range(10):
        prompt = [*ALIKE, index] if index % 2 else [(index * 31 + i * 3) % 900 + 5 for i in range(20 + index)]
        params = CoreSamplingParams(max_tokens=14, seed=index, temperature=0.0 if index % 3 else 0.8, top_p=0.95)
        core.add_request(EngineCoreRequest(f"{name}{index}", prompt, params))
    tokens: dict[str, list[int]] = {}
    while core.has_work():
        aborted = [f"{name}3"] if len(tokens.get("3", ())) > 4 else []
        for output in core.step(lambda ids=aborted: ids).outputs:
            tokens.setdefault(output.request_id.removeprefix(name), []).extend(output.new_token_ids)
    tokens["preemptions"] = [core.scheduler.stats().num_preemptions]
    return tokens


@pytest.mark.parametrize(("speculative", "kv"), [(None, "auto"), (None, "int8"), (DRAFTS, "auto")])
def test_preempted_aborted_and_drafted_requests(speculative: SpeculativeConfig | None, kv: str) -> None:
    cores = [make_core(eager=eager, speculative=speculative, kv=kv) for eager in (True, False)]
    expected, found = (generate(core) for core in cores)
    assert found == expected
    assert expected["preemptions"] > [0]
    assert num_recordings(cores[0]) == 0
    assert num_recordings(cores[1]) > 3
    for core in cores:
        core.shutdown()


def test_sleep_and_new_weights_drop_the_recordings() -> None:
    core = make_core(eager=False)
    expected = generate(core)
    worker = worker_of(core)
    worker.sleep(1)
    assert num_recordings(core) == 0
    worker.wake_up(["weights", "kv_cache"])
    core.scheduler.kv.pool.forget_all()
    found = generate(core, "b")
    assert num_recordings(core) > 3
    worker.reload_weights(DEMO_MODEL)
    assert num_recordings(core) == 0
    core.scheduler.kv.pool.forget_all()
    again = generate(core, "c")
    for tokens in (expected, found, again):
        del tokens["preemptions"]
    assert found == again == expected
    core.shutdown()

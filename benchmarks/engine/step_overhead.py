"""Measures what a step costs in Python without the model: schedule, batch preparation, update."""

import gc
import time
from dataclasses import dataclass
from typing import Any

from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.scheduling.scheduler import Scheduler
from tokenloom.gpu_worker.batch.input_batch import InputBatch

from ..load.datasets import DatasetOptions, make_prompts
from ..report.stats import Distribution

_BLOCK = 16
_VOCABULARY = 32_000
_WARM_STEPS = 20
PARTS = ("schedule", "prepare", "update")
"""The parts of a step in their order: scheduler, the worker's input batch, scheduler."""


@dataclass(frozen=True)
class OverheadOptions:
    """How many requests decode at once."""

    requests: int = 256
    context: int = 128
    """How many prompt tokens each request has."""
    steps: int = 200


def run_overhead(options: OverheadOptions) -> dict[str, Any]:
    """Return the median and 99th percentile µs of each part over the steps; a stub replaces the model."""
    loop = _Loop(options)
    for _ in range(loop.num_prefill_steps + _WARM_STEPS):
        loop.step()
    gc.collect()
    gc.freeze()
    try:
        rows = [loop.step() for _ in range(options.steps)]
    finally:
        gc.unfreeze()
    assert loop.num_decoding == options.requests
    report: dict[str, Any] = {"requests": options.requests, "context": options.context}
    for index, part in enumerate(PARTS):
        report |= Distribution.of([row[index] / 1e3 for row in rows]).fields(f"{part}_us")
    return report | Distribution.of([(row[0] + row[2]) / 1e3 for row in rows]).fields("schedule_update_us")


class _Loop:
    """Joins a scheduler and an input batch with a model that answers at once."""

    def __init__(self, options: OverheadOptions) -> None:
        budget = max(8192, options.requests)
        self.num_prefill_steps = -(-options.requests * options.context // budget) + 2
        output_len = self.num_prefill_steps + _WARM_STEPS + options.steps + 1
        max_model_len = options.context + output_len
        self.num_decoding = 0
        self._scheduler = Scheduler(
            EngineConfig(
                worker=WorkerConfig(model=""),
                cache=CacheConfig(block_size=_BLOCK),
                scheduler=SchedulerConfig(max_num_seqs=options.requests, max_num_batched_tokens=budget),
            ),
            KVCacheConfig(num_blocks=options.requests * (-(-max_model_len // _BLOCK) + 2), max_model_len=max_model_len),
        )
        self._batch = InputBatch(options.requests, max_model_len, _BLOCK)
        sampling = CoreSamplingParams(max_tokens=output_len, seed=0, temperature=0.0)
        dataset = DatasetOptions(num_prompts=options.requests, input_len=options.context)
        for index, prompt in enumerate(make_prompts(dataset, _VOCABULARY)):
            self._scheduler.add_request(EngineCoreRequest(f"{index}", prompt.token_ids, sampling))

    def step(self) -> tuple[int, int, int]:
        """Run a step and return the nanoseconds of each of `PARTS`."""
        started = time.perf_counter_ns()
        scheduled = self._scheduler.schedule()
        planned = time.perf_counter_ns()
        result = self._prepare(scheduled)
        prepared = time.perf_counter_ns()
        outputs = self._scheduler.results.apply(scheduled, result)
        self.num_decoding = len(outputs)
        return planned - started, prepared - planned, time.perf_counter_ns() - prepared

    def _prepare(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Do what the model runner does before and after the model."""
        batch = self._batch
        batch.update(scheduled)
        inputs = batch.prepare(scheduled.num_scheduled_tokens)
        batch.sampling(inputs.rows[inputs.sampled])
        sampled: list[list[int]] = [[] for _ in inputs.req_ids]
        batch.append(inputs.rows[inputs.sampled], inputs.sampled + 10)
        for index in inputs.sampled.tolist():
            sampled[index] = [10 + index]
        return ModelRunnerOutput(inputs.req_ids, sampled)

"""Measures how close a decode step comes to the machine's limit: the time to read weights and KV once, and to read and
write the states of layers that keep one."""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import (
    CacheConfig,
    Dtype,
    EngineConfig,
    SchedulerConfig,
    WorkerConfig,
)
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig
from tokenloom.gpu_worker.devices import CPUWorker

from ..load.datasets import DatasetOptions, make_prompts
from ..report.stats import percentile
from .bandwidth import read_bandwidth
from .checkpoint_bytes import weight_bytes
from .engine_memory import measure_memory

_WARM_STEPS = 4


@dataclass(frozen=True)
class DecodeOptions:
    """Says what is computed."""

    model: Path
    batches: tuple[int, ...] = (1, 8, 32)
    context: int = 512
    """How many tokens each request has when the measured steps begin."""
    steps: int = 64
    dtype: Dtype = "auto"
    threads: int = 0
    """0: one for each core."""
    attention_backend: str = "auto"


@dataclass(frozen=True)
class DecodeRun:
    """Holds the results."""

    rows: list[dict[str, Any]]
    """One result for each batch size."""
    memory: dict[str, Any]
    """The memory of the process after all of them; see :func:`.engine_memory.measure_memory`."""


def run_decode(options: DecodeOptions) -> DecodeRun:
    """Decode in batches of each size. The bandwidth is probed before and after each, with the same threads."""
    threads = options.threads or torch.get_num_threads()
    config = load_model_config(options.model, options.dtype)
    num_weight_bytes = weight_bytes(options.model, config)
    core = EngineCore(*_engine(options, config, threads))
    try:
        rows = [_row(core, options, config, batch, threads, num_weight_bytes) for batch in options.batches]
        num_kv_tokens = core.ready.num_kv_blocks * core.ready.block_size
        return DecodeRun(rows, measure_memory(options.model, config, num_kv_tokens))
    finally:
        core.shutdown()


def _row(
    core: EngineCore, options: DecodeOptions, config: ModelConfig, batch: int, threads: int, num_weight_bytes: int
) -> dict[str, Any]:
    before = read_bandwidth(threads)
    prefill_seconds = _prefill(core, options, config, batch)
    seconds = [_timed_step(core) for _ in range(_WARM_STEPS + options.steps)][_WARM_STEPS:]
    core.abort_requests([request.request_id for request in core.scheduler.running])
    after = read_bandwidth(threads)
    context = options.context + _WARM_STEPS + options.steps / 2
    kv_bytes = config.kv_bytes_per_token * context * batch
    state_bytes = 2 * config.state_bytes * batch
    bandwidth, step = (before + after) / 2, statistics.median(seconds)
    bound = (num_weight_bytes + kv_bytes + state_bytes) / bandwidth
    return {
        "batch": batch,
        "context": options.context,
        "threads": threads,
        "step_ms": round(step * 1e3, 3),
        "p99_step_ms": round(percentile(seconds, 99) * 1e3, 3),
        "bound_ms": round(bound * 1e3, 3),
        "share_of_bandwidth": round(bound / step, 4),
        "weight_bytes": num_weight_bytes,
        "kv_bytes": round(kv_bytes),
        "state_bytes": state_bytes,
        "bandwidth_before_gb_s": round(before / 1e9, 2),
        "bandwidth_after_gb_s": round(after / 1e9, 2),
        "decode_tokens_per_second": round(batch / step, 2),
        "prefill_tokens_per_second": round(batch * options.context / prefill_seconds, 1),
    }


def _prefill(core: EngineCore, options: DecodeOptions, config: ModelConfig, batch: int) -> float:
    """Compute all prompts, until every request decodes. Returns the seconds that it took."""
    num_tokens = _WARM_STEPS + options.steps + 2
    dataset = DatasetOptions(num_prompts=batch, input_len=options.context, output_len=num_tokens, seed=batch)
    sampling = CoreSamplingParams(max_tokens=num_tokens, seed=0, temperature=0.0)
    started = time.perf_counter()
    for index, prompt in enumerate(make_prompts(dataset, config.vocab_size)):
        core.add_request(EngineCoreRequest(f"{batch}-{index}", prompt.token_ids, sampling))
    # The first requests decode in the meantime, at most once in a step.
    while core.scheduler.waiting or any(r.num_tokens - r.kv.num_computed_tokens > 1 for r in core.scheduler.running):
        core.step()
    return time.perf_counter() - started


def _timed_step(core: EngineCore) -> float:
    started = time.perf_counter()
    core.step()
    return time.perf_counter() - started


def _engine(options: DecodeOptions, config: ModelConfig, threads: int) -> tuple[EngineConfig, UniProcExecutor]:
    batch = max(options.batches)
    # The budget takes a whole batch of prompts in few steps, so that early requests have room to wait for late ones.
    length = options.context + 2 * (_WARM_STEPS + options.steps)
    if length > config.max_model_len:
        raise ValueError(
            f"context {options.context} and {options.steps} steps exceed the model's {config.max_model_len}"
        )
    worker = WorkerConfig(
        model=str(options.model),
        dtype=options.dtype,
        num_threads=threads,
        attention_backend=options.attention_backend,
    )
    # Layers with a window have blocks of their own, and a pool of groups has one that nothing uses.
    kinds = len(set(config.sliding_windows))
    num_blocks = kinds * (batch * (-(-length // 16) + 1) + batch) + (kinds > 1)
    engine = EngineConfig(
        worker=worker,
        cache=CacheConfig(enable_prefix_caching=False, num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=max(2048, batch)),
        max_model_len=min(length, config.max_model_len),
    )
    return engine, UniProcExecutor(CPUWorker(engine))

"""Measures how close a prompt's computation comes to the machine's rate for matrix products of its shapes."""

import itertools
import statistics
import time
from collections.abc import Callable
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
from tokenloom.gpu_worker.layers.linear import make_linear

from ..load.datasets import DatasetOptions, make_prompts
from .checkpoint_bytes import embedding_bytes, weight_bytes

_BLOCK = 16
_PROBE_SECONDS = 0.15


@dataclass(frozen=True)
class PrefillOptions:
    """Says what is computed."""

    model: Path
    lengths: tuple[int, ...] = (512, 2048)
    """The lengths of the prompts; each is computed in one step."""
    repeats: int = 5
    dtype: Dtype = "auto"
    threads: int = 0
    """0: one for each core."""
    attention_backend: str = "auto"


def run_prefill(options: PrefillOptions) -> list[dict[str, Any]]:
    """Return a row for each length that fits into the context: medians of prompts. Products are timed before and after
    each prompt, with as many rows as it has tokens: a machine's speed may change from one prompt to the next."""
    threads = options.threads or torch.get_num_threads()
    config = load_model_config(options.model, options.dtype)
    lengths = [length for length in options.lengths if length < config.max_model_len]
    if not lengths:
        return []
    core = prompt_core(options, max(lengths), threads)
    try:
        return [_row(core, options, config, length) for length in lengths]
    finally:
        core.shutdown()


def prefill_flops(model: Path, config: ModelConfig, length: int) -> int:
    """Return the floating-point operations of a prompt: layers at every token, output layer at the last, attention."""
    output = embedding_bytes(config) // config.dtype.itemsize
    layers = weight_bytes(model, config) // config.dtype.itemsize - output
    pairs = length * (length + 1) // 2
    attention = 4 * pairs * config.num_heads * config.head_size * config.num_layers
    return 2 * layers * length + 2 * output + attention


class Products:
    """Multiplies so many rows by an MLP's two matrices, packed as in the model."""

    def __init__(self, config: ModelConfig, rows: int) -> None:
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self._up = make_linear(torch.randn(2 * inner, hidden).to(dtype))
        self._down = make_linear(torch.randn(hidden, inner).to(dtype))
        self._x, self._y = torch.randn(rows, hidden).to(dtype), torch.randn(rows, inner).to(dtype)
        self._flops = 6 * rows * hidden * inner

    def rate(self, seconds: float = _PROBE_SECONDS, clock: Callable[[], float] = time.perf_counter) -> float:
        """Return floating-point operations a second of ``clock``."""
        with torch.inference_mode():
            self._up(self._x), self._down(self._y)
            count, started = 0, clock()
            while not count or clock() - started < seconds:
                self._up(self._x), self._down(self._y)
                count += 1
            return self._flops * count / (clock() - started)


def _row(core: EngineCore, options: PrefillOptions, config: ModelConfig, length: int) -> dict[str, Any]:
    products, flops = Products(config, length), prefill_flops(options.model, config, length)
    timed_prompt(core, config, length, options.repeats)
    rates, seconds = [products.rate()], list[float]()
    for repeat in range(options.repeats):
        seconds.append(timed_prompt(core, config, length, repeat))
        rates.append(products.rate())
    step = statistics.median(seconds)
    around = [statistics.mean(pair) for pair in itertools.pairwise(rates)]
    shares = [flops / taken / rate for taken, rate in zip(seconds, around, strict=True)]
    return {
        "tokens": length,
        "step_ms": round(step * 1e3, 3),
        "tokens_per_second": round(length / step, 1),
        "gflops": round(flops / step / 1e9, 2),
        "gemm_least_gflops": round(min(rates) / 1e9, 2),
        "gemm_most_gflops": round(max(rates) / 1e9, 2),
        "share_of_gemm": round(statistics.median(shares), 4),
    }


def timed_prompt(core: EngineCore, config: ModelConfig, length: int, seed: int) -> float:
    """Return the seconds of a prompt of ``length`` tokens, until its first token is there."""
    (prompt,) = make_prompts(DatasetOptions(num_prompts=1, input_len=length, seed=seed), config.vocab_size)
    sampling = CoreSamplingParams(max_tokens=1, seed=0, temperature=0.0)
    core.add_request(EngineCoreRequest(f"prefill-{length}-{seed}", prompt.token_ids, sampling))
    started = time.perf_counter()
    while core.has_work():
        core.step()
    return time.perf_counter() - started


def prompt_core(options: PrefillOptions, longest: int, threads: int) -> EngineCore:
    """Return an engine that computes one prompt of up to ``longest`` tokens in one step, and keeps nothing of it."""
    engine = EngineConfig(
        worker=WorkerConfig(
            model=str(options.model),
            dtype=options.dtype,
            num_threads=threads,
            attention_backend=options.attention_backend,
        ),
        cache=CacheConfig(enable_prefix_caching=False, num_blocks=longest // _BLOCK + 4),
        scheduler=SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=longest),
        max_model_len=longest + 1,
    )
    return EngineCore(engine, UniProcExecutor(CPUWorker(engine)))

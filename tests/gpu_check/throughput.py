"""A small table: how fast a device prefills and decodes with a random model of a real shape."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tokenloom.engine_core.config import CacheConfig, EngineConfig, SchedulerConfig, WorkerConfig
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.messages import EngineCoreRequest
from tokenloom.gpu_worker.platform.devices import make_worker

_BUDGET = 8192


@dataclass(frozen=True)
class Row:
    """One batch: requests that begin together."""

    batch: int
    prefill_rate: float
    """Prompt tokens a second, until every request has its first token."""
    step_ms: float
    """Of a decode step, the mean."""
    decode_rate: float
    """Output tokens a second from then on."""


def measure(model: Path, device: str, batches: Sequence[int], *, prompt_len: int, output_len: int) -> Iterator[Row]:
    """Greedy, in the checkpoint's dtype; the first batch is computed twice, to warm up."""
    config = EngineConfig(
        worker=WorkerConfig(model=str(model), device=device),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=max(batches), max_num_batched_tokens=_BUDGET),
        max_model_len=prompt_len + output_len,
    )
    core = EngineCore(config, UniProcExecutor(make_worker(config)))
    try:
        _run(core, batches[0], prompt_len, output_len)
        for batch in batches:
            yield _run(core, batch, prompt_len, output_len)
    finally:
        core.shutdown()


def _run(core: EngineCore, batch: int, prompt_len: int, output_len: int) -> Row:
    rng = np.random.default_rng(batch)
    params = SamplingParams(max_tokens=output_len, seed=0, temperature=0.0)
    for index in range(batch):
        prompt = rng.integers(1, core.ready.vocab_size, prompt_len).tolist()
        core.add_request(EngineCoreRequest(f"{batch}-{index}", prompt, params))
    started = time.perf_counter()
    num_first = 0
    while num_first < batch:
        num_first += sum(output.token_index == 0 for output in core.step().outputs)
    prefilled = time.perf_counter()
    num_steps = num_tokens = 0
    while core.has_work():
        num_tokens += sum(len(output.new_token_ids) for output in core.step().outputs)
        num_steps += 1
    seconds = time.perf_counter() - prefilled
    return Row(batch, batch * prompt_len / (prefilled - started), seconds / num_steps * 1e3, num_tokens / seconds)

"""Measures decode attention: one layer, all requests at one context. Compares it with vLLM's CPU operation, in turns.

    python -m tokenloom.bench.engine.attention_decode MODEL --context 8192

compares a KV cache of 8 bits with one of the model's dtype, in turns, by the CPU seconds of one thread. It prints a
line for each number of requests. MODEL is a directory with a ``config.json``. With ``--whole-step`` MODEL is a
checkpoint, and whole decode steps are compared, with ``--threads`` above one by the time that passes.

    python -m tokenloom.bench.engine.attention_decode MODEL --context 32768 --chunk 512

measures the attention of the last 512 tokens of a prompt instead, with both dtypes of the KV cache, as a share of the
rate at which the model's MLP multiplies as many rows, measured before and after. ``--level`` limits the processor's
instructions.

    python -m tokenloom.bench.engine.attention_decode --latent-heads 16 128 --threads 2

measures attention over compressed vectors of DeepSeek's sizes in bfloat16 instead, for these numbers of heads, and
which share it reaches of its bound: what reading the vectors takes at the bandwidth, or the products at the rate of a
large product of bfloat16 matrices, both measured before and after with the same threads. One thread is measured by its
CPU time, which other programs disturb less.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenloom.engine_core.data.config import KVCacheDtype
from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.latent_backend import LatentCPUBackend, LatentProjection
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.model_config import LatentSwitches, ModelConfig
from tokenloom.gpu_worker.kernels.levels import LEVELS, limit_level
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.model import LanguageModel
from tokenloom.gpu_worker.ops.cpu_ops import make_ops

from .bandwidth import read_bandwidth
from .prefill_step import Products

_BLOCK = 16
_WARM = 3
_SECONDS = 1.5
KV_DTYPES: tuple[KVCacheDtype, ...] = ("auto", "int8")
_SCRIPT = Path(__file__).resolve().parents[1] / "peers" / "vllm_attention.py"


@dataclass(frozen=True)
class AttentionOptions:
    """Says what is compared."""

    model: Path
    vllm: Path
    """The environment that has vLLM: a directory with `bin/python`."""
    requests: tuple[int, ...] = (8, 32, 64)
    context: int = 512
    """How many tokens each request has."""
    threads: int = 0
    """0: one for each core."""
    seconds: float = _SECONDS
    """How long each measurement takes."""


def run_attention(options: AttentionOptions) -> list[dict[str, Any]]:
    """Return a row for each number of requests: the least µs of a call, ours and vLLM's, and the ratio vLLM / ours.

    Raises ``ValueError`` if vLLM's process ends.
    """
    config = load_model_config(options.model)
    threads = options.threads or torch.get_num_threads()
    rows = []
    with _Theirs(options, config, threads) as theirs:
        for requests in options.requests:
            # Twice, in turns, so that what slows the machine for a while slows both.
            pairs = [
                (ours_us(config, requests, options.context, options.seconds / 2), theirs.measure(requests))
                for _ in range(2)
            ]
            ours, vllm = (min(values) for values in zip(*pairs, strict=True))
            rows.append(
                {
                    "requests": requests,
                    "context": options.context,
                    "ours_us": round(ours, 1),
                    "vllm_us": round(vllm, 1),
                    "ratio": round(vllm / ours, 3),
                }
            )
    return rows


def ours_us(config: ModelConfig, requests: int, context: int, seconds: float) -> float:
    """Return the least µs of a call, with keys and values in huge pages if the system has any."""
    attend = decode_call(config, requests, context)
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < _WARM or time.perf_counter() < end:
        started = time.perf_counter()
        attend()
        taken.append(time.perf_counter() - started)
    return min(taken) * 1e6


def decode_call(config: ModelConfig, requests: int, context: int, tokens: int = 1) -> Callable[[], torch.Tensor]:
    """Return what attends with the last ``tokens`` of each request, over random keys and values of one layer."""
    config = replace(config, num_layers=1)
    backend = CPUBackend(config, _BLOCK, torch.device("cpu"))
    width = -(-context // _BLOCK)
    memory = PoolMemory.allocate(requests * width * _BLOCK * config.kv_bytes_per_token, shared=False)
    (cache,) = backend.allocate(requests * width, memory)
    tables = np.arange(requests * width).reshape(requests, width)
    positions = np.arange(requests * width * _BLOCK)
    starts, lengths = np.arange(requests + 1), np.full(requests, width * _BLOCK)
    rows = torch.randn(2, len(positions), config.num_kv_heads, config.head_size).to(config.dtype)
    backend.plan(starts * width * _BLOCK, lengths, tables, positions).write_kv(rows[0], rows[1], cache)
    query = torch.randn(requests * tokens, config.num_heads, config.head_size).to(config.dtype)
    slots = np.repeat(tables[:, -1] * _BLOCK, tokens)  # nothing is written
    plan = backend.plan(starts * tokens, np.full(requests, context), tables, slots)
    return partial(plan.attend, query, cache, ScoreRule(config.head_size**-0.5))


def times_of(call: Callable[[], object], count: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the median and the least seconds of ``count`` calls, after one that warms up."""
    taken = []
    for _ in range(count + 1):
        started = clock()
        call()
        taken.append(clock() - started)
    return statistics.median(taken[1:]), min(taken[1:])


def milliseconds(median: float, least: float) -> dict[str, float]:
    """Return the columns of a call's times, which are in seconds."""
    return {"median_ms": round(median * 1e3, 3), "least_ms": round(least * 1e3, 3)}


@torch.inference_mode()
def measure_chunk(config: ModelConfig, requests: int, context: int, tokens: int, pairs: int) -> dict[str, Any]:
    """Return the milliseconds of a call for the last ``tokens`` of each request, and its share of the rate at which
    products of as many rows are computed."""
    threads, attend = torch.get_num_threads(), decode_call(config, requests, context, tokens)
    products, clock = Products(config, tokens), time.process_time if threads == 1 else time.perf_counter
    before = products.rate(clock=clock)
    median, least = times_of(attend, pairs, clock)
    rate = statistics.mean((before, products.rate(clock=clock)))
    seen = requests * sum(range(context - tokens + 1, context + 1))
    flops = 4 * seen * config.num_heads * config.head_size
    return {
        "requests": requests,
        "context": context,
        "tokens": tokens,
        "threads": threads,
        **milliseconds(median, least),
        "attention_gflop_s": round(flops / median / 1e9, 1),
        "product_gflop_s": round(rate / 1e9, 1),
        "share": round(flops / median / rate, 3),
        "share_of_least": round(flops / least / rate, 3),
    }


LATENT = LatentSwitches(rank=512, rope_size=64, key_size=128, value_size=128, query_rank=None, is_interleaved=True)
"""The sizes of DeepSeek-V2 and V3, and of Kimi-K2."""


def latent_call(num_heads: int, requests: int, context: int) -> Callable[[], torch.Tensor]:
    """Return what attends with one token of each request, over random compressed vectors of one layer in bfloat16. The
    products that absorb the matrices of keys and values are not among it."""
    config = _latent_config(num_heads)
    backend = LatentCPUBackend(config, _BLOCK, torch.device("cpu"))
    width = -(-context // _BLOCK)
    memory = PoolMemory.allocate(requests * width * _BLOCK * config.kv_bytes_per_token, shared=False)
    (cache,) = backend.allocate(requests * width, memory)
    cache.copy_(torch.randn(cache.shape))
    # Blocks of a pool that was used for a while lie in any order.
    tables = np.random.default_rng(0).permutation(requests * width).reshape(requests, width)
    plan = backend.plan(np.arange(requests + 1), np.full(requests, context), tables, np.zeros(requests, np.int64))
    queries = torch.randn(requests, num_heads, config.head_size).to(config.dtype)
    projection = LatentProjection(torch.empty(num_heads * 256, LATENT.rank), LATENT, 0.1)
    return partial(plan.attend_absorbed, queries, plan.spans, cache, projection)


def _latent_config(num_heads: int) -> ModelConfig:
    return ModelConfig(
        family="deepseek_v3",
        dtype_name="bfloat16",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=1,
        num_heads=num_heads,
        num_kv_heads=1,
        head_size=LATENT.rank + LATENT.rope_size,
        max_model_len=1,
        norm_eps=1e-6,
        hidden_act="silu",
        tie_word_embeddings=False,
        latent=LATENT,
        attention_scales=(0.1,),
        sliding_windows=(None,),
    )


_PRODUCT_SIZE = 2048
_READ_BYTES = 1 << 28


def rates(pairs: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return how many bytes a second are read, and how many operations a second a product of two large bfloat16
    matrices makes: the best of ``pairs``. With several threads the bytes are those of :func:`read_bandwidth`."""

    def best(amount: int, work: Callable[[], object]) -> float:
        taken = []
        for _ in range(pairs):
            started = clock()
            work()
            taken.append(clock() - started)
        return amount / min(taken)

    threads = torch.get_num_threads()
    first, second = torch.randn(2, _PRODUCT_SIZE, _PRODUCT_SIZE).bfloat16()
    products = best(2 * _PRODUCT_SIZE**3, lambda: torch.mm(first, second.t()))
    if threads > 1:
        return read_bandwidth(threads), products
    return best(_READ_BYTES, torch.ones(_READ_BYTES // 8, dtype=torch.int64).sum), products


@torch.inference_mode()
def measure_latent(num_heads: int, requests: int, context: int, pairs: int) -> dict[str, Any]:
    """Return the milliseconds of a call, median and least, and the share of its bound that the median reaches."""
    threads, attend = torch.get_num_threads(), latent_call(num_heads, requests, context)
    clock = time.process_time if threads == 1 else time.perf_counter
    before = rates(pairs, clock)
    median, least = times_of(attend, pairs, clock)
    bandwidth, rate = (statistics.mean(each) for each in zip(before, rates(pairs, clock), strict=True))
    num_vectors, width = requests * context, LATENT.rank + LATENT.rope_size
    reading, products = num_vectors * width * 2 / bandwidth, 2 * num_vectors * num_heads * (width + LATENT.rank) / rate
    return {
        "heads": num_heads,
        "requests": requests,
        "context": context,
        "threads": threads,
        **milliseconds(median, least),
        "bandwidth_gb_s": round(bandwidth / 1e9, 1),
        "product_gflop_s": round(rate / 1e9, 1),
        "bound": "bandwidth" if reading > products else "products",
        "share_of_bound": round(max(reading, products) / median, 3),
        "share_of_bound_of_least": round(max(reading, products) / least, 3),
    }


def step_call(model: LanguageModel, config: ModelConfig, requests: int, context: int) -> Callable[[], torch.Tensor]:
    """Return what computes a decode step of ``model`` with the KV cache of ``config``, up to the logits.

    All requests read the same random blocks, each in an order of its own, so that they take the memory of one.
    """
    backend = CPUBackend(config, _BLOCK, torch.device("cpu"))
    width = -(-context // _BLOCK)
    num_tokens = width * _BLOCK
    memory = PoolMemory.allocate(num_tokens * config.kv_bytes_per_token, shared=False)
    caches = backend.allocate(width, memory)
    filling = backend.plan(
        np.array([0, num_tokens]), np.array([num_tokens]), np.arange(width)[None], np.arange(num_tokens)
    )
    for cache in caches:
        rows = torch.randn(2, num_tokens, config.num_kv_heads, config.head_size).to(config.dtype)
        filling.write_kv(rows[0], rows[1], cache)
    tables = np.stack([np.roll(np.arange(width), request * width // requests) for request in range(requests)])
    lengths = np.full(requests, context)
    ids, positions = torch.arange(requests), torch.from_numpy(lengths - 1)
    slots = tables[:, (context - 1) // _BLOCK] * _BLOCK + (context - 1) % _BLOCK

    def step() -> torch.Tensor:
        plan = backend.plan(np.arange(requests + 1), lengths, tables, slots)
        return model.compute_logits(model.forward(ids, positions, caches, plan))

    return step


def compare_kv_dtypes(config: ModelConfig, requests: int, context: int, pairs: int) -> dict[str, Any]:
    """Return what :func:`compare_calls` does of the attention of one layer, in CPU time."""
    configs = {dtype: replace(config, kv_cache_dtype=dtype) for dtype in KV_DTYPES}
    calls = {dtype: decode_call(each, requests, context) for dtype, each in configs.items()}
    return {"requests": requests, "context": context} | compare_calls(calls, configs, pairs, time.process_time)


@torch.inference_mode()
def compare_steps(model: LanguageModel, requests: int, context: int, pairs: int) -> dict[str, Any]:
    """Return what :func:`compare_calls` does of whole decode steps, in CPU time if one thread computes them, otherwise
    in the time that passes."""
    configs = {dtype: replace(model.config, kv_cache_dtype=dtype) for dtype in KV_DTYPES}
    calls = {dtype: step_call(model, each, requests, context) for dtype, each in configs.items()}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    return {"requests": requests, "context": context} | compare_calls(calls, configs, pairs, clock)


def compare_calls(
    calls: dict[KVCacheDtype, Callable[[], torch.Tensor]],
    configs: dict[KVCacheDtype, ModelConfig],
    pairs: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Return the milliseconds of a call, median and least, with each dtype of the KV cache, and how often faster int8
    is. The calls take turns, so that what slows the machine for a while slows both."""
    taken: dict[str, list[float]] = {dtype: [] for dtype in calls}
    for _ in range(pairs + 1):  # the first one warms up
        for dtype, call in calls.items():
            started = clock()
            call()
            taken[dtype].append((clock() - started) * 1e3)
    medians = {dtype: statistics.median(values[1:]) for dtype, values in taken.items()}
    return {
        "bytes_per_token_and_layer": {d: each.kv_bytes_per_token // each.num_layers for d, each in configs.items()},
        "median_ms": {dtype: round(value, 3) for dtype, value in medians.items()},
        "least_ms": {dtype: round(min(values), 3) for dtype, values in taken.items()},
        "speedup": round(medians["auto"] / medians["int8"], 3),
        "speedup_of_least": round(min(taken["auto"]) / min(taken["int8"]), 3),
    }


def main() -> None:
    """Compare the dtypes of the KV cache."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--latent-heads", type=int, nargs="+", help="measure compressed vectors instead of a model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--pairs", type=int, default=31, help="calls with each dtype")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--whole-step", action="store_true", help="compare whole decode steps")
    parser.add_argument("--chunk", type=int, default=0, help="measure so many last tokens of each request instead")
    parser.add_argument("--level", choices=[level.name for level in LEVELS], help="of the processor")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.level:
        limit_level(arguments.level)
    if arguments.latent_heads:
        for heads, requests in itertools.product(arguments.latent_heads, arguments.requests):
            print(json.dumps(measure_latent(heads, requests, arguments.context, arguments.pairs)))
        return
    if arguments.model is None:
        parser.error("name a MODEL, or give --latent-heads")
    compare: Callable[[int, int, int], dict[str, Any]]
    if arguments.chunk:
        config = load_model_config(arguments.model, arguments.dtype)
        compare = partial(_chunk_rows, config, arguments.chunk)
    elif arguments.whole_step:
        ops = make_ops("auto", torch.device("cpu"))
        compare = partial(compare_steps, load_model(arguments.model, arguments.dtype, ops=ops))
    else:
        compare = partial(compare_kv_dtypes, load_model_config(arguments.model, arguments.dtype))
    for requests in arguments.requests:
        print(json.dumps(compare(requests, arguments.context, arguments.pairs)))


def _chunk_rows(config: ModelConfig, tokens: int, requests: int, context: int, pairs: int) -> dict[str, Any]:
    """Return what :func:`measure_chunk` does, by the dtype of the KV cache."""
    configs = {dtype: replace(config, kv_cache_dtype=dtype) for dtype in KV_DTYPES}
    return {dtype: measure_chunk(each, requests, context, tokens, pairs) for dtype, each in configs.items()}


class _Theirs:
    """Runs the process in vLLM's environment. A context manager."""

    def __init__(self, options: AttentionOptions, config: ModelConfig, threads: int) -> None:
        python = options.vllm / "bin" / "python"
        if not python.exists():
            raise ValueError(f"vllm: {options.vllm} has no bin/python")
        setup = {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_size": config.head_size,
            "dtype": str(config.dtype).removeprefix("torch."),
            "context": options.context,
            "threads": threads,
            "seconds": options.seconds / 2,
        }
        self._process = subprocess.Popen(
            [str(python), "-P", str(_SCRIPT), json.dumps(setup)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> "_Theirs":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def measure(self, requests: int) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(requests, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise ValueError("vllm: its process ended; its output is above")
        return float(answer)


if __name__ == "__main__":
    main()

"""Compares our decode attention with vLLM's CPU operation: one layer, all requests at one context, in turns."""

import json
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenloom.engine_core.kv_cache.pool_memory import PoolMemory
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.score_rule import ScoreRule
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig, load_model_config

_BLOCK = 16
_WARM = 3
_SECONDS = 1.5
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
    backend = CPUBackend(config, _BLOCK, torch.device("cpu"))
    width = -(-context // _BLOCK)
    shape = (2, requests * width, config.num_kv_heads, _BLOCK, config.cache_head_size)
    memory = PoolMemory.allocate(int(np.prod(shape)) * config.dtype.itemsize, shared=False)
    cache = torch.frombuffer(memory.buffer, dtype=config.dtype)[: int(np.prod(shape))].view(shape)
    cache.copy_(torch.randn(shape))
    query = torch.randn(requests, config.num_heads, config.head_size).to(config.dtype)
    tables = np.arange(requests * width).reshape(requests, width)
    lengths = np.full(requests, context)
    plan = backend.plan(np.arange(requests + 1), lengths, tables, tables[:, -1] * _BLOCK)
    taken: list[float] = []
    rule = ScoreRule(config.head_size**-0.5)
    end = time.perf_counter() + seconds
    while len(taken) < _WARM or time.perf_counter() < end:
        started = time.perf_counter()
        plan.attend(query, cache, rule)
        taken.append(time.perf_counter() - started)
    return min(taken) * 1e6


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

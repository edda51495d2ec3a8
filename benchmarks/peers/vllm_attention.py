"""Times vLLM's CPU attention operation in vLLM's environment: a line of JSON in (requests), a line out (µs)."""

import importlib
import json
import os
import sys
import time
from typing import Any

_BLOCK = 128
"""vLLM's default on the CPU."""
_WARM = 3


def main(argv: list[str]) -> None:
    """``argv`` is a JSON object with num_heads, num_kv_heads, head_size, dtype, context, threads, seconds."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries may print to standard output
    setup: dict[str, Any] = json.loads(argv[0])
    torch: Any = importlib.import_module("torch")
    ops: Any = importlib.import_module("vllm._custom_ops")
    importlib.import_module("vllm.platforms").current_platform.import_kernels()
    torch.cpu._init_amx()  # requests the matrix unit from the system; otherwise its instructions end the process
    torch.set_num_threads(setup["threads"])
    for line in sys.stdin:
        print(json.dumps(_measure(torch, ops, setup, int(json.loads(line)))), file=answers)


def _measure(torch: Any, ops: Any, setup: dict[str, Any], requests: int) -> float:
    """Return the least µs of a call."""
    backend: Any = importlib.import_module("vllm.v1.attention.backends.cpu_attn")
    heads, kv_heads, size, context = (setup[key] for key in ("num_heads", "num_kv_heads", "head_size", "context"))
    dtype = getattr(torch, setup["dtype"])
    isa = backend._get_attn_isa(dtype, _BLOCK, size)
    width = -(-context // _BLOCK)
    # vLLM's layout: keys and values of a block are adjacent.
    cache = torch.randn(requests * width, kv_heads, 2 * _BLOCK, size).to(dtype)
    keys, values = cache.chunk(2, dim=2)
    query = torch.randn(requests, heads, size).to(dtype)
    output = torch.empty_like(query)
    starts = torch.arange(requests + 1, dtype=torch.int32)
    lengths = torch.full((requests,), context, dtype=torch.int32)
    table = torch.arange(requests * width, dtype=torch.int32).view(requests, width)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        requests, heads, kv_heads, size, lengths, dtype, starts, True, -1, isa, True
    )

    def call() -> None:
        ops.cpu_attention_with_kv_cache(
            query, keys, values, output, starts, lengths, size**-0.5, True, None, -1, table, 0.0, metadata, None
        )

    taken: list[float] = []
    end = time.perf_counter() + setup["seconds"]
    while len(taken) < _WARM or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return min(taken) * 1e6


if __name__ == "__main__":
    main(sys.argv[1:])

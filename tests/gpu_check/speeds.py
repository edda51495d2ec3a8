"""How fast the kernels are alone, from graphs; the ceilings say which share of the memory's speed that is."""

import numpy as np
import torch
import torch.nn.functional as F

from tests.gpu_check.rows import Rows, graph_ms
from tests.gpu_worker.attention.steps import shape
from tokenloom.gpu_worker.attention.score_rule import ScoreRule
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend
from tokenloom.gpu_worker.cuda.sampler_kernels import TritonSamplerKernels, draw
from tokenloom.gpu_worker.layers.triton_linear import TritonLinear

GPU = torch.device("cuda")
_COPIES = 8
"""Sets of data that take turns, so that none stays in the cache."""


def run(rows: Rows) -> None:
    for count, length in ((1, 512), (1, 8192), (8, 2048), (32, 512), (128, 512), (128, 2048)):
        _decode(rows, count, length)
    _prefill(rows, 8192)
    for count in (1, 8, 16, 32, 128, 8192):
        _product(rows, count, 4096, 6144)
        _product(rows, count, 4096, 28672)
        _product(rows, count, 14336, 4096)
    for top_k, top_p in ((0, 1.0), (50, 1.0), (0, 0.9), (50, 0.9)):
        _sampler(rows, top_k, top_p)
    for count in (1, 128):
        _asking_rows(rows, count)


def _plan(backend: TritonBackend, query_lens: list[int], length: int):  # type: ignore[no-untyped-def]
    count, blocks = len(query_lens), -(-length // 16)
    tables = np.random.default_rng(0).permutation(count * blocks).reshape(count, blocks)
    slots = np.zeros(sum(query_lens), dtype=np.int64)
    return backend.plan(np.cumsum([0, *query_lens]), np.full(count, length), tables, slots)


def _decode(rows: Rows, count: int, length: int) -> None:
    backend = TritonBackend(shape(8, torch.bfloat16, 32, 128), 16, GPU)
    plan = _plan(backend, [1] * count, length)
    caches = [torch.randn(2, count * -(-length // 16), 8, 16, 128, device=GPU, dtype=torch.bfloat16) for _ in range(4)]
    query = torch.randn(count, 32, 128, device=GPU, dtype=torch.bfloat16)
    ms = graph_ms(lambda: [plan.attend(query, cache, ScoreRule(128**-0.5)) for cache in caches]) / len(caches)
    rows.add(f"attention, {count} decodes of {length}", us=ms * 1e3, gb_per_s=2 * count * length * 2048 / ms / 1e6)


def _prefill(rows: Rows, length: int) -> None:
    backend = TritonBackend(shape(8, torch.bfloat16, 32, 128), 16, GPU)
    plan = _plan(backend, [length], length)
    cache = torch.randn(2, length // 16, 8, 16, 128, device=GPU, dtype=torch.bfloat16)
    query = torch.randn(length, 32, 128, device=GPU, dtype=torch.bfloat16)
    ms = graph_ms(lambda: plan.attend(query, cache, ScoreRule(128**-0.5)), 2)
    rows.add(f"attention, prefill of {length}", ms=ms, tflop_per_s=2 * 2 * 32 * 128 * length * length / 2 / ms / 1e9)


def _product(rows: Rows, count: int, inputs: int, outputs: int) -> None:
    weights = [torch.randn(outputs, inputs, device=GPU, dtype=torch.bfloat16) for _ in range(_COPIES)]
    x = torch.randn(count, inputs, device=GPU, dtype=torch.bfloat16)
    for name, layers in (
        ("Triton", [TritonLinear(weight) for weight in weights] if count <= 16 else []),
        ("cuBLAS", [lambda x, weight=weight: F.linear(x, weight) for weight in weights]),
    ):
        if layers:
            ms = graph_ms(lambda layers=layers: [layer(x) for layer in layers], 2) / len(layers)
            speed = weights[0].nbytes / ms / 1e6
            rate = 2 * count * inputs * outputs / ms / 1e9
            rows.add(f"product {count} x {inputs} x {outputs}, {name}", us=ms * 1e3, gb_per_s=speed, tflop_per_s=rate)


def _sampler(rows: Rows, top_k: int, top_p: float) -> None:
    logits = torch.randn(128, 151_936, device=GPU) * 3
    ones = torch.ones(128, device=GPU, dtype=torch.float64)
    columns = (ones, ones * top_p, ones * 0, torch.rand(128, device=GPU, dtype=torch.float64))
    top_ks = torch.full((128,), top_k, device=GPU, dtype=torch.int32)
    ms = graph_ms(lambda: draw(logits, (*columns, top_ks)), 4)
    rows.add(f"sampler, 128 x 151,936, top-k {top_k}, top-p {top_p}", ms=ms)


def _asking_rows(rows: Rows, count: int, vocab: int = 151_936) -> None:
    """What penalties and log probabilities of so many rows add to a step of 128."""
    logits, kernels = torch.randn(128, vocab, device=GPU) * 3, TritonSamplerKernels()
    ints, doubles = torch.arange(count, device=GPU, dtype=torch.int32), torch.ones(count, device=GPU).double()
    none = torch.full((count,), -1, device=GPU, dtype=torch.int32)
    starts, listed = torch.zeros(count + 1, device=GPU, dtype=torch.int32), ints[:0]
    masks = torch.empty(0, -(-vocab // 32), device=GPU, dtype=torch.int32)
    seen = torch.zeros(count, vocab, device=GPU, dtype=torch.int32)
    penalties = (doubles, doubles * 0, doubles * 0)  # which leave the logits as they are
    edits = [ints, starts, listed, listed.float(), none, masks, ints, *penalties, none]
    rows.add(f"penalties, {count} of 128 rows", us=graph_ms(lambda: kernels.change(logits, edits, seen), 4) * 1e3)
    tokens, own = torch.zeros(count, device=GPU, dtype=torch.int64), logits[:count]
    wanted = [torch.full_like(ints, 20), starts, listed]
    us = graph_ms(lambda: kernels.find_logprobs(own, wanted, tokens, 20), 4) * 1e3
    rows.add(f"20 log probabilities, {count} rows", us=us)

"""The kernels on the device against a reference in float64 or float32, on random data."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu_check.rows import Rows
from tests.gpu_worker.attention import steps
from tests.gpu_worker.cuda.sampling_steps import Steps, bitmask, check_equal
from tokenloom.engine_core.wire.core_sampling_params import SamplingParams
from tokenloom.engine_core.wire.scheduler_output import GrammarOutput
from tokenloom.gpu_worker.attention.reference import ReferenceBackend
from tokenloom.gpu_worker.attention.score_rule import ScoreRule
from tokenloom.gpu_worker.attention.triton_backend import TritonBackend
from tokenloom.gpu_worker.cuda.sampler import DeviceSampler
from tokenloom.gpu_worker.cuda.sampler_kernels import TritonSamplerKernels
from tokenloom.gpu_worker.layers.triton_experts import TritonExperts
from tokenloom.gpu_worker.layers.triton_linear import TritonLinear
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.ops.triton_ops import TritonOps
from tokenloom.gpu_worker.sampler import Sampler

GPU = torch.device("cuda")
LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""The largest ‖found - expected‖ / ‖expected‖."""
_NEAR_BOUNDARY = 2
"""Of 256 rows: their number falls within rounding of a boundary."""


def run(rows: Rows) -> None:
    """Check in several processes, because compiling a kernel keeps one core busy for seconds."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=2 * len(LIMITS) + 2, mp_context=spawn) as pool:
        tasks = [pool.submit(_check, rows, parts, dtype) for dtype in LIMITS for parts in ("attention", "others")]
        tasks += [pool.submit(_sampler, rows), pool.submit(_asking_rows, rows)]
        wrong = [name for task in tasks for name in task.result()]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


def _check(rows: Rows, parts: str, dtype: torch.dtype) -> list[str]:
    """Run a part of the checks of a dtype. Returns the names of those that are wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    checks: list[Callable[[Rows, torch.dtype], list[str]]] = [_products, _layer, _experts]
    if parts == "attention":
        checks = [_attention]
    return [name for check in checks for name in check(rows, dtype)]


def _compare(rows: Rows, name: str, dtype: torch.dtype, found: Tensor, expected: Tensor) -> list[str]:
    found, expected = found.double().cpu(), expected.double().cpu()
    error = float((found - expected).norm() / expected.norm())
    name = f"{name}, {str(dtype).removeprefix('torch.')}"
    rows.add(name, error=error)
    return [] if error <= LIMITS[dtype] else [name]  # NaN does not pass


def _attention(rows: Rows, dtype: torch.dtype) -> list[str]:
    wrong = []
    batches = {
        "decodes": ([1] * 20, list(range(1, 800, 40))),
        "a split decode": ([1, 1], [3000, 5]),
        "mixed": ([1, 300, 1, 70], [500, 300, 90, 400]),
    }
    for batch, (query_lens, seq_lens) in batches.items():
        for heads, size, window in (((32, 8), 128, None), ((8, 4), 256, 200), ((14, 2), 64, None), ((32, 32), 80, 64)):
            config = steps.shape(heads[1], dtype, heads[0], size)
            step = steps.make_step(query_lens, seq_lens, heads[0], config)
            sinks = torch.linspace(-2, 4, heads[0]) if size == 64 else None
            softcap = 30.0 if size == 256 else None
            rule = ScoreRule(size**-0.5, window, softcap, sinks)
            expected, _ = steps.run_rule(ReferenceBackend(config, 16, steps.CPU), step, rule)
            step.query, step.key, step.value, step.cache = (
                each.to(GPU) for each in (step.query, step.key, step.value, step.cache)
            )
            on_gpu = ScoreRule(size**-0.5, window, softcap, None if sinks is None else sinks.to(GPU))
            found, _ = steps.run_rule(TritonBackend(config, 16, GPU), step, on_gpu)
            wrong += _compare(rows, f"attention, {batch}, heads of {size}", dtype, found, expected)
    return wrong


def _random(dtype: torch.dtype, *size: int) -> Tensor:
    generator = torch.Generator(GPU).manual_seed(sum(size))
    return torch.randn(*size, generator=generator, device=GPU).to(dtype)


def _products(rows: Rows, dtype: torch.dtype) -> list[str]:
    wrong = []
    for count, inputs, outputs in ((1, 4096, 6144), (7, 1000, 333), (16, 14336, 4096), (300, 1024, 1024)):
        x, weight = _random(dtype, count, inputs), _random(dtype, outputs, inputs) / 32
        bias = _random(dtype, outputs)
        expected = F.linear(x.double(), weight.double(), bias.double())
        wrong += _compare(
            rows, f"product {count} x {inputs} x {outputs}", dtype, TritonLinear(weight, bias)(x), expected
        )
    return wrong


def _layer(rows: Rows, dtype: torch.dtype) -> list[str]:
    wrong = []
    x, delta, weight = _random(dtype, 33, 4096), _random(dtype, 34, 4096)[1:], _random(dtype, 4096)
    expected = TorchOps().add_norm(x.double(), delta.double(), weight.double(), 1e-6)
    wrong += _compare(rows, "add and norm", dtype, TritonOps().add_norm(x, delta, weight, 1e-6), expected)
    for activation in ("silu", "gelu", "gelu_new"):
        both = _random(dtype, 33, 2 * 14336)
        found = TritonOps().gate(both, activation)
        wrong += _compare(rows, f"gate, {activation}", dtype, found, TorchOps().gate(both.double(), activation))
    if dtype != torch.float32:
        x, weight = _random(dtype, 5, 4096), _random(dtype, 2 * 1000, 4096) / 32
        expected = TorchOps().gate(x.double() @ weight.double().T, "silu")
        wrong += _compare(rows, "product with gates", dtype, TritonLinear(weight).gated(x, "silu"), expected)
    return wrong


def _experts(rows: Rows, dtype: torch.dtype) -> list[str]:
    wrong = []
    for tokens in (1, 9, 400):
        x, chosen = _random(dtype, tokens, 512), torch.rand(tokens, 8, device=GPU).topk(2).indices
        gate_up, down = _random(dtype, 8, 2 * 256, 512) / 16, _random(dtype, 8, 512, 256) / 16
        weights = torch.rand(tokens, 2, device=GPU)
        gates, ups = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, dim=-1)
        every = torch.einsum("tei,ehi->teh", F.silu(gates) * ups, down.double())
        picked = every.gather(1, chosen[..., None].expand(-1, -1, 512))
        expected = (picked * weights.double()[..., None]).sum(1)
        wrong += _compare(
            rows, f"experts, {tokens} rows", dtype, TritonExperts(gate_up, down, "silu")(x, weights, chosen), expected
        )
    return wrong


def _sampler(rows: Rows, count: int = 256, vocab: int = 151_936) -> list[str]:
    kinds = (
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 50},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.8, "top_k": 100, "top_p": 0.95, "min_p": 0.02},
    )
    logits = np.random.default_rng(3).normal(0.0, 3.0, (count, vocab)).astype(np.float32)
    params = [SamplingParams(max_tokens=4, seed=row, **kinds[row % len(kinds)]) for row in range(count)]
    indices = np.arange(count)
    found = DeviceSampler(TritonSamplerKernels()).sample(torch.from_numpy(logits).to(GPU), params, indices)
    expected = Sampler().sample(logits, params, indices)
    different = sum(a != b for a, b in zip(found, expected, strict=True))
    rows.add("sampler", rows_drawn=count, different=different)
    return [] if different <= _NEAR_BOUNDARY else ["sampler"]


def _asking_rows(rows: Rows, vocab: int = 151_936) -> list[str]:
    """Penalties, biases, masks and log probabilities of rows beside each other, several steps long."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    listed = {
        "logit_bias": {7: 3.0, 90_000: -2.0},
        "bad_words": ((8,), (2, 7)),
        "min_tokens": 2,
        "stop_token_ids": (1,),
    }
    requests: list[dict[str, Any]] = [
        {"temperature": 0.0} | penalties,
        {"temperature": 1.0, "logprobs": 20, "logprob_token_ids": (5,)} | penalties | listed,
        {"temperature": 1.0, "allowed_token_ids": tuple(range(0, vocab, 1000))},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "logprobs": 0},
    ]
    device = Steps(requests, DeviceSampler(TritonSamplerKernels()), "cuda", vocab)
    host = Steps(requests, None, vocab=vocab)
    for step in range(6):
        grammar = GrammarOutput(["r0"], bitmask(*range(100, 9000), vocab=vocab)) if step % 2 else None
        try:
            check_equal(device.run(grammar), host.run(grammar))
        except AssertionError as error:
            rows.add("rows that ask for more", different=1, error=str(error)[:200])
            return ["rows that ask for more"]
    rows.add("rows that ask for more", different=0)
    return []

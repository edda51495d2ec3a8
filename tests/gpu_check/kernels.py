"""The kernels on the device against a reference in float64 or float32, on random data."""

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu_check.rows import Rows
from tests.gpu_check.sampler_kernels import check_asking_rows, check_draws
from tests.gpu_check.states import check_states
from tests.gpu_check.target import GPU, Target
from tests.gpu_worker.attention import steps
from tokenloom.gpu_worker.attention.attention_backend import FP8_KV, ScoreRule
from tokenloom.gpu_worker.attention.library_backends import make_library_backend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.attention.triton_backend import FEWEST_SHARING, TritonBackend
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import QuantizedWeight
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES
from tokenloom.gpu_worker.cuda.row_kernels import copy_pool_blocks, pool_words
from tokenloom.gpu_worker.layers.expert_routes import ExpertRoutes
from tokenloom.gpu_worker.layers.fp8_linear import Fp8Linear, round_rows, round_weight
from tokenloom.gpu_worker.layers.triton_linear import (
    GroupedLinear,
    TritonExperts,
    TritonLinear,
    multiply_few,
    round_rows_at_once,
)
from tokenloom.gpu_worker.ops.torch_ops import TorchOps
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

LIMITS = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""The largest ‖found - expected‖ / ‖expected‖."""
_EXPERT = (512, 256)
"""Hidden size, and what gates and ups of an expert lead to."""


def run(rows: Rows, target: Target = GPU) -> None:
    """Check in several processes, because compiling a kernel keeps one core busy for seconds; each task has one of its
    own, because an error of the device stays with a process that met it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), spawn, max_tasks_per_child=1) as pool:
        # What takes longest comes first.
        tasks = [pool.submit(check, rows, target, part, dtype) for part in PARTS for dtype in LIMITS]
        tasks += [pool.submit(part, rows, target) for part in (check_draws, check_asking_rows)]
        wrong = [name for task in tasks for name in task.result()]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


def check(rows: Rows, target: Target, part: str, dtype: torch.dtype) -> list[str]:
    """Run a part of the checks of a dtype. Returns the names of those that are wrong."""
    torch.backends.cuda.matmul.allow_tf32 = False
    return PARTS[part](rows, target, dtype)


def _compare(rows: Rows, name: str, dtype: torch.dtype, found: Tensor, expected: Tensor) -> list[str]:
    found, expected = found.double().cpu(), expected.double().cpu()
    error = float((found - expected).norm() / expected.norm())
    name = f"{name}, {str(dtype).removeprefix('torch.')}"
    rows.add(name, error=error)
    return [] if error <= LIMITS[dtype] else [name]  # NaN does not pass


def _attention_of_fp8(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    return _attention(rows, target, dtype, FP8_KV)


def _attention(rows: Rows, target: Target, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> list[str]:
    wrong = []
    batches = {
        "decodes": ([1] * 20, list(range(1, 800, 40))),
        "a split decode": ([1, 1], [3000, 5]),
        "mixed": ([1, 300, 1, 70], [500, 300, 90, 400]),
    }
    shapes = (((32, 8), 128, None), ((8, 4), 256, 200), ((14, 2), 64, None), ((32, 32), 80, 64))
    if target.is_tiny:
        batches, shapes = {"mixed": ([1, 5], [40, 20])}, (((4, 2), 32, None),)
    for batch, (query_lens, seq_lens) in batches.items():
        for heads, size, window in shapes:
            config = steps.shape(heads[1], dtype, heads[0], size, kv_dtype)
            step = steps.make_step(query_lens, seq_lens, heads[0], config)
            sinks = torch.linspace(-2, 4, heads[0]) if size == 64 else None
            softcap = 30.0 if size == 256 else None
            rule = ScoreRule(size**-0.5, window, softcap, sinks)
            expected, _ = steps.run_rule(ReferenceBackend(config, 16, steps.CPU), step, rule)
            step.query, step.key, step.value, step.cache = (
                each.to(target.device) for each in (step.query, step.key, step.value, step.cache)
            )
            on_gpu = ScoreRule(size**-0.5, window, softcap, None if sinks is None else sinks.to(target.device))
            found, _ = steps.run_rule(TritonBackend(config, 16, target.device), step, on_gpu)
            name = f"attention, {batch}, heads of {size}" + (", fp8 KV" if kv_dtype else "")
            wrong += _compare(rows, name, dtype, found, expected)
    return wrong


def _shared_keys(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    """Decodes of which two groups read keys together, in caches of both kinds."""
    wrong = []
    for heads, size, kv_dtype in target.pick(
        (((32, 8), 128, None), ((8, 4), 256, None), ((14, 2), 64, None), ((32, 8), 128, FP8_KV)),
        (((4, 2), 32, None),),
    ):
        config = steps.shape(heads[1], dtype, heads[0], size, kv_dtype)
        groups = target.pick([(list(range(23)), 20), (list(range(23, 31)), 9)], [([0, 2], 1)])
        lengths = target.pick([330 + 7 * index for index in range(32)], [40] * FEWEST_SHARING)
        step, rule = steps.shared_step(config, lengths, groups), ScoreRule(size**-0.5, softcap=30.0)
        expected, _ = steps.run_rule(ReferenceBackend(config, 16, steps.CPU), step, rule)
        backend = TritonBackend(config, 16, target.device)
        plan = steps.shared_plan(backend, step.arrays, steps.prefixes_of(groups), device=target.device)
        query, key, value, cache = (each.to(target.device) for each in (step.query, step.key, step.value, step.cache))
        plan.write_kv(key, value, cache)
        name = f"attention, shared keys, heads of {size}" + (", fp8 KV" if kv_dtype else "")
        wrong += _compare(rows, name, dtype, plan.attend(query, cache, rule), expected)
    return wrong


def _attention_of_libraries(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    """Those that are installed, over the same kinds of steps as Triton's kernel."""
    wrong, (heads, kv_heads, size) = [], (32, 8, 128)
    config = steps.shape(kv_heads, dtype, heads, size)
    batches = {"decodes": ([1] * 20, list(range(1, 800, 40))), "mixed": ([1, 300, 1, 70], [500, 300, 90, 400])}
    for name, library in LIBRARIES.items():
        if dtype == torch.float32 or not target.has_gpu or not library.is_installed:
            rows.skip(
                f"attention by {name}", f"{library.distribution} is not installed, there is no GPU, or in {dtype}"
            )
            continue
        backend = make_library_backend(name, config, 16, target.device)
        for batch, lengths in batches.items():
            for window in (None, 200):
                step, rule = steps.make_step(*lengths, heads, config), ScoreRule(size**-0.5, window)
                expected, _ = steps.run_rule(ReferenceBackend(config, 16, steps.CPU), step, rule)
                step.query, step.key, step.value, step.cache = (
                    each.to(target.device) for each in (step.query, step.key, step.value, step.cache)
                )
                found, _ = steps.run_rule(backend, step, rule)
                wrong += _compare(rows, f"attention by {name}, {batch}, window {window}", dtype, found, expected)
    return wrong


def _random(target: Target, dtype: torch.dtype, *size: int) -> Tensor:
    generator = torch.Generator(target.device).manual_seed(sum(size))
    return torch.randn(*size, generator=generator, device=target.device).to(dtype)


def _products(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    wrong = []
    shapes = ((1, 4096, 6144), (7, 1000, 333), (16, 14336, 4096), (300, 1024, 1024))
    for count, inputs, outputs in target.pick(shapes, ((2, 128, 64),)):
        x, weight = _random(target, dtype, count, inputs), _random(target, dtype, outputs, inputs) / 32
        bias = _random(target, dtype, outputs)
        expected = F.linear(x.double(), weight.double(), bias.double())
        wrong += _compare(
            rows, f"product {count} x {inputs} x {outputs}", dtype, TritonLinear(weight, bias)(x), expected
        )
    return wrong


def _products_of_4_bits(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    wrong = []
    for count, inputs, outputs, group in target.pick(
        ((1, 4096, 6144, 128), (16, 14336, 4096, 128), (200, 4096, 4096, 32), (300, 4096, 1024, 64)),
        ((2, 128, 64, 64),),
    ):
        values = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, device=target.device)
        scales, offsets = (_random(target, torch.float32, outputs, inputs // group) / 64 for _ in range(2))
        weight, x = QuantizedWeight(values, scales, offsets, group), _random(target, dtype, count, inputs)
        found = GroupedLinear(weight, None, target.device)(x)
        expected = F.linear(x.double(), weight.dequantize().double())
        wrong += _compare(rows, f"product of 4 bits {count} x {inputs} x {outputs}", dtype, found, expected)
    return wrong


def _layer(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    wrong = []
    size, inner = target.pick((4096, 14336), (64, 96))
    x, delta, weight = (_random(target, dtype, *each) for each in ((33, size), (34, size), (size,)))
    delta = delta[1:]
    expected = TorchOps().add_norm(x.double(), delta.double(), weight.double(), 1e-6)
    wrong += _compare(rows, "add and norm", dtype, TritonOps().add_norm(x, delta, weight, 1e-6), expected)
    for activation in ("silu", "gelu", "gelu_new"):
        both = _random(target, dtype, 33, 2 * inner)
        found = TritonOps().gate(both, activation)
        wrong += _compare(rows, f"gate, {activation}", dtype, found, TorchOps().gate(both.double(), activation))
    if dtype != torch.float32:
        x, weight = _random(target, dtype, 5, size), _random(target, dtype, 2 * target.pick(1000, 48), size) / 32
        expected = TorchOps().gate(x.double() @ weight.double().T, "silu")
        wrong += _compare(rows, "product with gates", dtype, TritonLinear(weight).gated(x, "silu"), expected)
    return wrong


def _experts(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    wrong = []
    for tokens in target.pick((1, 9, 400), (3,)):
        hidden, inner = target.pick(_EXPERT, (64, 48))
        x, chosen = _random(target, dtype, tokens, hidden), torch.rand(tokens, 8, device=target.device).topk(2).indices
        gate_up = _random(target, dtype, 8, 2 * inner, hidden) / 16
        down = _random(target, dtype, 8, hidden, inner) / 16
        weights = torch.rand(tokens, 2, device=target.device)
        gates, ups = torch.einsum("th,eih->tei", x.double(), gate_up.double()).chunk(2, dim=-1)
        every = torch.einsum("tei,ehi->teh", F.silu(gates) * ups, down.double())
        picked = every.gather(1, chosen[..., None].expand(-1, -1, hidden))
        expected = (picked * weights.double()[..., None]).sum(1)
        found = TritonExperts(gate_up, down, "silu")(x, weights, chosen, *_places(chosen))
        wrong += _compare(rows, f"experts, {tokens} rows", dtype, found, expected)
    return wrong


def _places(chosen: Tensor) -> tuple[Tensor, Tensor]:
    return ExpertRoutes(8, chosen.shape[1], 1).layers[0].places(chosen)


def _eight_bits(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    """Products and experts with weights of 8-bit floats, against the same numbers in float64."""
    wrong = []
    shapes = ((1, 4096, 6144), (16, 14336, 4096))
    for count, inputs, outputs in target.pick(shapes, ((2, 128, 64),)):
        x, weight = _random(target, dtype, count, inputs), _random(target, dtype, outputs, inputs) / 32
        values, scales = round_weight(weight)
        expected = F.linear(x.double(), values.double() * scales[:, None])
        if dtype != torch.float32:
            found = multiply_few(x, values, scales, None)
            wrong += _compare(rows, f"fp8 product {count} x {inputs} x {outputs}", dtype, found, expected)
    numbers, scales = round_rows_at_once(x)
    wrong += _compare(rows, "rows as fp8", dtype, scales, round_rows(x)[1])
    different = int((numbers.view(torch.uint8) != round_rows(x)[0].view(torch.uint8)).sum())
    rows.add(f"rows as fp8, {str(dtype).removeprefix('torch.')}", different=different, of=numbers.numel())
    hidden, inner = target.pick(_EXPERT, (64, 48))
    gate_up, down = _random(target, dtype, 8, 2 * inner, hidden) / 16, _random(target, dtype, 8, hidden, inner) / 16
    (up_values, up_scales), (down_values, down_scales) = round_rows(gate_up), round_rows(down)
    x, chosen = _random(target, dtype, 9, hidden), torch.rand(9, 8, device=target.device).topk(2).indices
    weights = torch.rand(9, 2, device=target.device)
    plain = [
        values.float() * scales[..., None] for values, scales in ((up_values, up_scales), (down_values, down_scales))
    ]
    expected = TritonExperts(*plain, "silu")(x.float(), weights, chosen, *_places(chosen))
    found = TritonExperts(up_values, down_values, "silu", up_scales, down_scales)(x, weights, chosen, *_places(chosen))
    wrong += _compare(rows, "fp8 experts, 9 rows", dtype, found, expected)
    return wrong + _many_fp8_rows(rows, target, dtype)


def _many_fp8_rows(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    """The tensor cores' product of 8-bit floats with a scale for each row, against float64."""
    if not target.has_gpu or dtype != torch.bfloat16:
        return []
    x, weight = _random(target, dtype, 300, 4096), _random(target, dtype, 6144, 4096) / 32
    (numbers, units), (values, scales) = round_rows(x), round_weight(weight)
    expected = F.linear(numbers.double() * units[:, None], values.double() * scales[:, None])
    return _compare(rows, "fp8 product 300 x 4096 x 6144", dtype, Fp8Linear(weight)(x), expected)


def _block_copy(rows: Rows, target: Target, dtype: torch.dtype) -> list[str]:
    regions, blocks, size = target.pick((64, 500, 2048), (2, 9, 64))
    source, copied = (_random(target, dtype, regions, blocks, size) for _ in range(2))
    copied.zero_()
    ids = torch.randperm(blocks, device=target.device)[: blocks // 2]
    expected = copied.clone()
    expected[:, ids.flip(0)] = source[:, ids]
    copy_pool_blocks(pool_words(source), pool_words(copied), ids, ids.flip(0))
    name = f"block copy, {str(dtype).removeprefix('torch.')}"
    equal = torch.equal(copied, expected)
    rows.add(name, equal=str(equal))
    return [] if equal else [name]


PARTS: dict[str, Callable[[Rows, Target, torch.dtype], list[str]]] = {
    "attention": _attention,
    "attention, fp8 KV": _attention_of_fp8,
    "attention of libraries": _attention_of_libraries,
    "attention, shared keys": _shared_keys,
    "products of 4 bits": _products_of_4_bits,
    "fp8": _eight_bits,
    "experts": _experts,
    "products": _products,
    "layer": _layer,
    "block copy": _block_copy,
    "states": check_states,
}
"""What is checked in a process of its own for each dtype."""

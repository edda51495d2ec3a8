"""How fast the kernels are alone, from graphs, and which of several wins; the ceilings say which share that is."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.gpu_check import sampler_speeds
from tests.gpu_check.ceilings import PRODUCT, READ
from tests.gpu_check.rows import Rows
from tests.gpu_check.states import recurrences
from tests.gpu_check.target import GPU, Target
from tests.gpu_worker.attention.steps import prefixes_of, shape, shared_plan
from tokenloom.gpu_worker.attention.attention_backend import AttentionPlan, ScoreRule
from tokenloom.gpu_worker.attention.library_backends import make_library_backend
from tokenloom.gpu_worker.attention.states import FROM_ZERO, StatePlan
from tokenloom.gpu_worker.attention.triton_backend import FEWEST_SHARING, TritonBackend
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import QuantizedWeight
from tokenloom.gpu_worker.checkpoint.local_config import LIBRARIES
from tokenloom.gpu_worker.checkpoint.mixer_config import STATE_CHUNK, StatePrompts
from tokenloom.gpu_worker.layers.fp8_linear import Fp8Linear
from tokenloom.gpu_worker.layers.triton_linear import GroupedLinear, TritonLinear, multiply_few
from tokenloom.gpu_worker.ops.triton_ops import TritonOps

_BLOCK = 16
_FP8_KV = torch.float8_e4m3fn


def run(rows: Rows, target: Target = GPU) -> None:
    for count, length in target.pick(((1, 512), (1, 8192), (8, 2048), (32, 512), (128, 512), (128, 2048)), ((2, 40),)):
        _attention(rows, target, [1] * count, length)
    _attention(rows, target, [target.pick(8192, 20)], target.pick(8192, 20))
    _attention(rows, target, [1] * target.pick(128, 2), target.pick(512, 40), _FP8_KV)
    for shared in target.pick((256, 1792), (16,)):
        _shared_keys(rows, target, target.pick(128, FEWEST_SHARING), target.pick(2048, 40), shared)
    _prompt_states(rows, target)
    sampler_speeds.run(rows, target)
    counts = target.pick((1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), (1, 20))
    for inputs, outputs in target.pick(((4096, 6144), (4096, 28672), (14336, 4096)), ((64, 32),)):
        for count in counts:
            _product(rows, target, count, inputs, outputs)


def _attention(
    rows: Rows, target: Target, query_lens: list[int], length: int, kv_dtype: torch.dtype | None = None
) -> None:
    """The kernel of ours, and those of libraries that are installed, over the same pages."""
    heads, kv_heads, size = target.pick((32, 8, 128), (4, 2, 16))
    config = shape(kv_heads, target.dtype, heads, size, kv_dtype)
    backend = TritonBackend(config, _BLOCK, target.device)
    count, blocks = len(query_lens), -(-length // _BLOCK)
    tables = np.random.default_rng(0).permutation(count * blocks).reshape(count, blocks)
    slots = np.zeros(sum(query_lens), dtype=np.int64)
    arrays = (np.cumsum([0, *query_lens]), np.full(count, length), tables, slots)
    plan = backend.plan(*arrays)
    query = target.random(sum(query_lens), heads, size)
    width = (kv_dtype or target.dtype).itemsize
    caches = [
        target.random(2, count * blocks, kv_heads, _BLOCK, size).to(kv_dtype or target.dtype)
        for _ in range(target.turns(2 * count * blocks * kv_heads * _BLOCK * size * width))
    ]
    rule = ScoreRule(size**-0.5)
    ways: dict[str, Callable[[torch.Tensor], object]] = {"Triton": lambda cache: plan.attend(query, cache, rule)}
    for name, library in LIBRARIES.items():
        knows = kv_dtype is None or library.has_fp8_cache
        if knows and (theirs := _of_library(rows, name, target, arrays, query, config)) is not None:
            ways[name] = theirs
    is_prefill = query_lens[0] > 1
    what = f"prefill of {length}" if is_prefill else f"{count} decodes of {length}"
    if kv_dtype is not None:
        what += ", fp8 KV"
    found = {}
    for name, way in ways.items():
        calls = target.pick(2 if is_prefill else max(1, 16 // len(caches)), 1)
        ms = _ms(rows, target, f"attention, {what}, {name}", lambda way=way: [way(each) for each in caches], calls)
        if ms is None:
            continue
        ms = found[name] = ms / len(caches)
        if is_prefill:
            rate = 2 * heads * size * length * length / ms / 1e9
            values = {"tflop_per_s": rate, **_share(rows, PRODUCT, "tflop_per_s", rate)}
        else:
            rate = 2 * count * length * kv_heads * size * caches[0].itemsize / ms / 1e6
            values = {"gb_per_s": rate, **_share(rows, READ, "gb_per_s", rate)}
        rows.add(f"attention, {what}, {name}", us=ms * 1e3, **values)
    if "flashinfer" in found:
        # Wanted: 0.95 at least.
        rows.add(f"share of FlashInfer's speed: {what}", share=found["flashinfer"] / found["Triton"])
    _winner(rows, f"attention, {what}", found)


def _shared_keys(rows: Rows, target: Target, count: int, length: int, shared: int) -> None:
    """Decodes that share tokens: each reading them, and all together."""
    heads, kv_heads, size = target.pick((32, 8, 128), (4, 2, 16))
    config, what = shape(kv_heads, target.dtype, heads, size), f"{count} decodes of {length}, {shared} shared"
    backend, width = TritonBackend(config, _BLOCK, target.device), -(-length // _BLOCK)
    blocks, prefixes = count * width, prefixes_of([(list(range(count)), shared // _BLOCK)])
    tables = np.random.default_rng(0).permutation(blocks).reshape(count, width)
    tables[:, : shared // _BLOCK] = tables[0, : shared // _BLOCK]
    arrays: dict[str, Any] = {"cu_query_lens": np.arange(count + 1), "seq_lens": np.full(count, length)}
    arrays |= {"block_tables": tables, "slot_mapping": np.zeros(count, dtype=np.int64)}
    plans = {
        "each alone": backend.plan(**arrays),
        "read together": shared_plan(backend, arrays, prefixes, device=target.device),
    }
    query, rule = target.random(count, heads, size), ScoreRule(size**-0.5)
    caches = [
        target.random(2, blocks, kv_heads, _BLOCK, size)
        for _ in range(target.turns(2 * blocks * kv_heads * _BLOCK * size * target.dtype.itemsize))
    ]
    found = {}
    for name, plan in plans.items():
        way = partial(_over, plan, query, caches, rule)
        if (ms := _ms(rows, target, f"attention, {what}, {name}", way, target.pick(2, 1))) is not None:
            found[name] = ms / len(caches)
            rows.add(f"attention, {what}, {name}", us=found[name] * 1e3)
    _winner(rows, f"attention, {what}", found)


def _over(plan: AttentionPlan, query: torch.Tensor, caches: list[torch.Tensor], rule: ScoreRule) -> list[torch.Tensor]:
    return [plan.attend(query, cache, rule) for cache in caches]


def _of_library(
    rows: Rows, name: str, target: Target, arrays: tuple[Any, ...], query: torch.Tensor, config: Any
) -> Callable[[torch.Tensor], object] | None:
    """Return a library's attention, as engines call it, over a cache [2, blocks, kv_heads, block, size]; None: it is
    not there, or does not work here."""
    if not target.has_gpu or not LIBRARIES[name].is_installed:
        return None
    try:
        plan = make_library_backend(name, config, _BLOCK, target.device).plan(*arrays)
    except Exception as error:  # compilers, wheels and versions of it differ
        rows.skip(f"attention by {name}", f"{type(error).__name__}: {error}"[:200])
        return None
    return lambda cache: plan.attend(query, cache, ScoreRule(query.shape[2] ** -0.5))


def _product(rows: Rows, target: Target, count: int, inputs: int, outputs: int) -> None:
    # As many as keep the smallest of them, of 8 bits, out of the device's cache.
    weights = [target.random(outputs, inputs) / 8 for _ in range(target.turns(outputs * inputs))]
    x = target.random(count, inputs)
    ways: dict[str, list[Callable[[torch.Tensor], object]]] = {
        "cuBLAS": [lambda x, weight=weight: F.linear(x, weight) for weight in weights]
    }
    if count <= 16:
        ways["Triton"] = [TritonLinear(weight) for weight in weights]
        rounded = [(layer._weight, layer._scales) for layer in map(Fp8Linear, weights)]
        ways["Triton, fp8"] = [lambda x, pair=pair: multiply_few(x, *pair, None) for pair in rounded]
    elif target.has_gpu:
        ways["fp8"] = [Fp8Linear(weight) for weight in weights]
    if inputs % (2 * _GROUP) == 0:
        ways["4 bits"] = [_of_4_bits(target, outputs, inputs) for _ in range(target.turns(outputs * inputs // 2))]
    found = {}
    for name, layers in ways.items():
        what, calls = f"product {count} x {inputs} x {outputs}, {name}", target.pick(2, 1)
        ms = _ms(rows, target, what, lambda layers=layers: [layer(x) for layer in layers], calls)
        if ms is None:
            continue
        ms = found[name] = ms / len(layers)
        width = 0.5 if name == "4 bits" else 1 if "fp8" in name else weights[0].itemsize
        speed, rate = inputs * outputs * width / ms / 1e6, 2 * count * inputs * outputs / ms / 1e9
        share = _share(rows, READ, "gb_per_s", speed) if count <= 64 else _share(rows, PRODUCT, "tflop_per_s", rate)
        rows.add(what, us=ms * 1e3, gb_per_s=speed, tflop_per_s=rate, **share)
    _winner(
        rows,
        f"product {count} x {inputs} x {outputs}",
        {k: v for k, v in found.items() if "fp8" not in k and k != "4 bits"},
    )


_GROUP = 128


def _of_4_bits(target: Target, outputs: int, inputs: int) -> GroupedLinear:
    device = target.device
    values = torch.randint(-8, 8, (outputs, inputs), dtype=torch.int8, device=device)
    return GroupedLinear(
        QuantizedWeight(values, torch.rand(outputs, inputs // _GROUP, device=device), None, _GROUP), None, device
    )


def _prompt_states(rows: Rows, target: Target) -> None:
    """A prompt of layers that keep a state: token after token, in chunks, and with fla-core where it is installed."""
    (heads, size), length = target.pick((32, 128), (4, 16)), target.pick(2048, 20)
    layers = recurrences(torch.randn(length, 2 * heads * size).to(target.dtype), heads, size)
    for kind, layer in layers.items():
        inputs, weights = ([each.to(target.device) for each in part] for part in (layer.inputs, layer.weights))
        states, found = layer.states.to(target.device), {}
        ways: list[StatePrompts] = ["scan", "chunks"]
        if target.has_gpu and kind != "mamba-2" and find_spec("fla") is not None:
            ways.append("fla")
        for way in ways:
            what, chunk = f"{kind}, prompt of {length}, {way}", 1 if way == "scan" else STATE_CHUNK
            plan = StatePlan.make([length], [FROM_ZERO], [1], [], chunk).send(target.device)
            compute = partial(layer.compute, TritonOps(way).states, inputs, weights, states, plan)
            if (ms := _ms(rows, target, what, compute, target.pick(2, 1))) is not None:
                found[way] = ms
                rows.add(what, us=ms * 1e3)
        _winner(rows, f"{kind}, prompt of {length}", found)


def _ms(rows: Rows, target: Target, name: str, run: Callable[[], object], calls: int) -> float | None:
    """Return the milliseconds of a call; None, with a row that says why: this way does not work here, others may."""
    try:
        return target.graph_ms(run, calls)
    except Exception as error:  # libraries have errors of their own
        rows.skip(name, f"{type(error).__name__}: {error}"[:200])
        return None


def _share(rows: Rows, name: str, column: str, value: float) -> dict[str, float]:
    ceiling = rows.find(name, column)
    return {"share_of_ceiling": value / ceiling} if ceiling else {}


def _winner(rows: Rows, what: str, found: dict[str, float]) -> None:
    """Say which of several ways took the least time."""
    if len(found) > 1:
        best, second = sorted(found.items(), key=lambda each: each[1])[:2]
        rows.add(f"winner: {what}", winner=best[0], faster=second[1] / best[1] - 1)

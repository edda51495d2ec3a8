"""What every kernel does with NaN and infinities: a result that PyTorch computes as not finite is not finite either,
and results of other rows keep their bits. So a model's fault is counted, and no token follows from it."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, CPU, make_step, rules, run_rule, shape
from tests.gpu_worker.lora.test_slots import OUTPUTS, Layer
from tests.pairwise import pairs
from tokenloom.gpu_worker.attention.attention_backend import ScoreRule
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import QuantizedWeight
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers.panel_linear import PanelLinear
from tokenloom.gpu_worker.layers.quantized_linear import Int8Linear, QuantizedLinear
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.ops.torch_ops import TorchOps

VALUES = [float("nan"), float("inf"), float("-inf")]
DTYPES = [torch.float32, torch.bfloat16]
HEADS = [(4, 4), (8, 2), (6, 1), (16, 1)]
"""Queries and keys; some processors have a kernel of their own for each."""
INPUTS, LINEAR_OUTPUTS = 192, 96


def random(*size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def quantized(largest: int, *, offsets: bool) -> Callable[[Tensor], QuantizedLinear]:
    """Make layers of values up to ``largest`` of int8."""

    def make(weight: Tensor) -> QuantizedLinear:
        values = torch.randint(-largest - 1, largest + 1, weight.shape, generator=torch.Generator().manual_seed(0))
        scales = random(len(weight), INPUTS // 32).abs() + 0.1
        return QuantizedLinear(QuantizedWeight(values.to(torch.int8), scales, scales if offsets else None, 32), None)

    return make


LAYERS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "panels": PanelLinear,
    "int8": lambda weight: Int8Linear(weight, None),
    "4 bits": quantized(7, offsets=False),
    "8 bits with offsets": quantized(127, offsets=True),
}


Rule = Callable[[int], ScoreRule]
"""Makes the rule of scores for a number of heads."""


def check_product(name: str, dtype: torch.dtype, value: float, num_rows: int) -> None:
    """A row with one such number has no finite result, others are as without it."""
    weight = random(LINEAR_OUTPUTS, INPUTS)
    try:
        layer = LAYERS[name](weight.to(dtype) if name == "panels" else weight)
    except KernelsUnavailable as error:
        pytest.skip(str(error))
    x = random(num_rows, INPUTS).to(dtype)
    clean = layer(x)
    spoilt = num_rows // 2
    x[spoilt, 37] = value
    found = layer(x)
    assert clean.isfinite().all()
    assert not found[spoilt].isfinite().any()
    others = torch.arange(num_rows) != spoilt
    assert torch.equal(found[others], clean[others])


def check_fused(dtype: torch.dtype, value: float) -> None:
    """Norms, gates and rotations, where a single number meets others."""
    for place in (0, 5, 130, 255):
        residual, delta, gate_up = (random(7, 256 + n).to(dtype)[:, :256].contiguous() for n in range(3))
        weight = random(256).to(dtype)
        residual[1, place], delta[2, place], gate_up[3, place] = value, value, value
        outputs = []
        for ops in (TorchOps(), CPUOps()):
            stream = residual.clone()
            outputs.append((ops.add_norm(stream, delta, weight, 1e-5, 0.0), stream, ops.gate(gate_up, "silu")))
        for expected, found in zip(*outputs, strict=True):
            assert not found[~expected.isfinite()].isfinite().any()
            torch.testing.assert_close(found[4:], expected[4:], rtol=2e-2, atol=5e-2)


def steps(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> Iterator[tuple[Any, list[int], list[int]]]:
    batches = ["one decode", "first token", "chunks of longer prompts", "decodes between prefills"]
    shapes = [*BATCHES.values(), ([1, 1], [900, 20])] if kv_dtype is None else [BATCHES[name] for name in batches]
    for num_heads, num_kv_heads in HEADS:
        config = shape(num_kv_heads, dtype, num_heads, kv_dtype=kv_dtype)
        for query_lens, seq_lens in shapes:
            yield config, query_lens, seq_lens


def check_attention(dtype: torch.dtype, value: float, kv_dtype: torch.dtype | None, where: str, rule_of: Rule) -> None:
    """Queries, keys and values of a request's last token, which its own query sees."""
    for config, query_lens, seq_lens in steps(dtype, kv_dtype):
        step = make_step(query_lens, seq_lens, config.num_heads, config)
        ends = np.cumsum(query_lens)
        request = len(ends) // 2
        last = int(ends[request]) - 1
        rule = rule_of(config.num_heads)
        getattr(step, where)[last, :, 3] = value
        expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, rule)
        found, _ = run_rule(CPUBackend(config, BLOCK_SIZE, CPU), step, rule)
        lost = ~expected[last].isfinite()  # earlier ones of its chunk may be lost too: zero times NaN is NaN
        assert not found[last, lost].isfinite().any(), (config.num_heads, config.num_kv_heads, query_lens, seq_lens)
        others = torch.ones(len(found), dtype=torch.bool)
        others[last + 1 - query_lens[request] : last + 1] = False
        assert found[others].isfinite().all()


def plain_rule(num_heads: int) -> ScoreRule:
    return ScoreRule(0.5, None)


def limited_rule(num_heads: int) -> ScoreRule:
    return rules(num_heads, None)["softcap"]


def sinks_rule(num_heads: int) -> ScoreRule:
    return rules(num_heads, None)["sinks"]


def check_lone_infinity(dtype: torch.dtype) -> None:
    """A token whose only score is minus infinity has no finite result."""
    for num_heads, num_kv_heads in HEADS:
        config = shape(num_kv_heads, dtype, num_heads)
        step = make_step([1, 1], [1, 40], num_heads, config)
        step.query[0], step.key[0] = 1.0, 1.0
        step.key[0, :, 3] = float("-inf")
        expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, plain_rule(num_heads))
        assert expected[0].isnan().all()
        found, _ = run_rule(CPUBackend(config, BLOCK_SIZE, CPU), step, plain_rule(num_heads))
        assert found[0].isnan().all()
        assert found[1].isfinite().all()


ATTENTION = pairs(["query", "key", "value"], VALUES, DTYPES, [plain_rule, sinks_rule, limited_rule])


def check_lora(dtype: torch.dtype, value: float) -> None:
    layer = Layer(dtype, [3, 17, 8], use_kernel=True)
    x, slots = random(7, layer.weight.shape[1]).to(dtype), [0, 1, 0, 2, -1, 1, 1]
    clean = layer(x, slots)
    x[2, 11] = value
    found = layer(x, slots)
    assert not found[2].isfinite().any()
    others = [row for row in range(7) if row != 2]
    assert torch.equal(found[others], clean[others])
    assert found.shape[1] == sum(OUTPUTS)

"""Layers of a module that read the same input become one product."""

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from tokenloom.gpu_worker.models.transformers.modules import MergedPart, merge_layers
from tokenloom.gpu_worker.ops.torch_ops import TorchOps


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


class Projections(nn.Module):
    def __init__(self, bias: bool = True, other_bias: bool = True, inputs: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, 48, bias=bias)
        self.k_proj = nn.Linear(inputs, 16, bias=bias)
        self.v_proj = nn.Linear(32, 16, bias=other_bias)


def count_products(module: Any) -> list[int]:
    """Return the list to which each product of the merged layers appends its number of rows."""
    merged, rows = module.q_proj.__dict__["merged"], list[int]()
    linear = merged.linear

    def counted(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return linear(x)

    merged.linear = counted
    return rows


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_layers_of_one_input_are_one_product(bias: bool) -> None:
    module = Projections(bias, bias)
    inputs = [torch.randn(1, rows, 32) for rows in (5, 1)]
    names = ("q_proj", "k_proj", "v_proj")
    expected = [[getattr(module, name)(x) for name in names] for x in inputs]
    merge_layers(module, None, TorchOps())
    products = count_products(module)
    for x, wanted in zip(inputs, expected, strict=True):
        for name, each in zip(names, wanted, strict=True):
            torch.testing.assert_close(getattr(module, name)(x), each, rtol=1e-5, atol=1e-5)
    assert products == [5, 1]
    assert module.q_proj.weight.shape == (48, 32)


@torch.inference_mode()
def test_each_layer_computes_its_own_input() -> None:
    module = Projections()
    x, y = torch.randn(3, 32), torch.randn(3, 32)
    expected = [module.q_proj(x), module.k_proj(y), module.q_proj(x), module.q_proj(y), module.v_proj(y)]
    merge_layers(module, None, TorchOps())
    found = [module.q_proj(x), module.k_proj(y), module.q_proj(x), module.q_proj(y), module.v_proj(y)]
    for each, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_nothing_is_kept_after_the_last_part() -> None:
    module = Projections()
    merge_layers(module, None, TorchOps())
    x = torch.randn(3, 32)
    gone = weakref.ref(x)
    module.q_proj(x), module.k_proj(x), module.v_proj(x)
    del x
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("module", [Projections(other_bias=False), Projections(inputs=24)])
def test_layers_that_differ_stay(module: nn.Module) -> None:
    merge_layers(module, None, TorchOps())
    assert type(module.q_proj) is type(module.v_proj) is nn.Linear


def mlp(activation: str, kind: type[LlamaMLP] = LlamaMLP, dtype: torch.dtype = torch.float32) -> nn.Module:
    config = transformers.LlamaConfig(hidden_size=32, intermediate_size=96, hidden_act=activation)
    return kind(config).to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@torch.inference_mode()
def test_a_gated_mlp_is_computed_whole(activation: str, dtype: torch.dtype) -> None:
    module, x = mlp(activation, dtype=dtype), torch.randn(1, 7, 32).to(dtype)
    expected = module(x)
    merge_layers(module, None, TorchOps())
    assert isinstance(module.gate_proj, MergedPart)
    assert "forward" in vars(module)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(module(x), expected, rtol=tolerance, atol=tolerance)


class ClippedMLP(LlamaMLP):
    gate_limit, up_limit, result_limit = 0.1, math.inf, math.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.act_fn(self.gate_proj(x)).clamp(max=self.gate_limit)
        up = self.up_proj(x).clamp(-self.up_limit, self.up_limit)
        return self.down_proj((gate * up).clamp(-self.result_limit, self.result_limit))


class ClippedAt10(ClippedMLP):
    gate_limit = 10.0


class ClippedUpAt500(ClippedMLP):
    gate_limit, up_limit = math.inf, 500.0


class ClippedResultAt64000(ClippedMLP):
    gate_limit, result_limit = math.inf, 64000.0


@pytest.mark.parametrize("kind", [ClippedMLP, ClippedAt10, ClippedUpAt500, ClippedResultAt64000])
@torch.inference_mode()
def test_an_mlp_that_computes_something_else_keeps_its_forward_pass(kind: type[LlamaMLP]) -> None:
    """Whatever the size is at which it does."""
    module, x = mlp("silu", kind), torch.randn(1, 7, 32) * 1e4
    expected = module(x)
    merge_layers(module, None, TorchOps())
    assert isinstance(module.gate_proj, MergedPart)
    assert "forward" not in vars(module)
    torch.testing.assert_close(module(x), expected, rtol=1e-5, atol=1e-5)

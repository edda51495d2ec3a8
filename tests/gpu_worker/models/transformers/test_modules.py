"""Our layers in place of transformers'."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tokenloom.gpu_worker.models.transformers.experts import can_group
from tokenloom.gpu_worker.models.transformers.modules import LinearModule, NormModule, replace_modules
from tokenloom.gpu_worker.models.transformers.paged_attention import UnservableModel
from tokenloom.gpu_worker.ops.cpu_ops import make_ops
from tokenloom.gpu_worker.ops.torch_ops import TorchOps


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, GemmaRMSNorm])
@torch.inference_mode()
def test_norms_with_either_meaning_of_the_weight_are_replaced(kind: Any, dtype: torch.dtype) -> None:
    module = nn.Sequential(kind(64)).to(dtype)
    module[0].weight.normal_()
    x = torch.randn(1, 5, 4, 64).to(dtype)
    expected = module(x)
    replace_modules(module, None, TorchOps(), None)
    assert isinstance(module[0], NormModule)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(module(x), expected, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_a_norm_of_bfloat16_weights_computes_float32_rows_as_transformers_does() -> None:
    module = nn.Sequential(Mamba2RMSNorm(64)).to(torch.bfloat16)
    module[0].weight.normal_()
    x = torch.randn(1, 5, 64)
    expected = module(x)
    replace_modules(module, None, make_ops("auto", torch.device("cpu")), None)
    assert isinstance(module[0], NormModule)
    assert torch.equal(module(x), expected)
    assert module(x.to(torch.bfloat16)).dtype == torch.bfloat16


@torch.inference_mode()
def test_a_linear_layer_refuses_rows_of_another_dtype_as_torch_does() -> None:
    module = nn.Sequential(nn.Linear(64, 96)).to(torch.bfloat16)
    replace_modules(module, None, TorchOps(), None)
    with pytest.raises(TypeError, match=r"rows of .*float32 for a linear layer of .*bfloat16"):
        module(torch.randn(3, 64))


class OddRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 3 * super().forward(hidden_states)


class ClippedRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states.clamp(-1e4, 1e4))


@pytest.mark.parametrize("kind", [OddRMSNorm, ClippedRMSNorm])
@torch.inference_mode()
def test_a_norm_that_computes_something_else_stays(kind: type[LlamaRMSNorm]) -> None:
    module = nn.Sequential(kind(64))
    replace_modules(module, None, TorchOps(), None)
    assert type(module[0]) is kind


@torch.inference_mode()
def test_linear_layers_are_replaced_and_the_head_keeps_its_dtype() -> None:
    module = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 128, bias=False))
    x = torch.randn(2, 3, 64)
    expected = module(x)
    replace_modules(module, module[1], TorchOps(), "int8-dynamic")
    assert [type(part) for part in module] == [LinearModule, LinearModule]
    assert type(module[0]._linear).__name__ == "Int8Linear"
    assert type(module[1]._linear).__name__ != "Int8Linear"
    assert (module(x) - expected).norm() < 0.02 * expected.norm()


@torch.inference_mode()
def test_experts_are_grouped() -> None:
    config: Any = SimpleNamespace(
        num_local_experts=4, hidden_size=32, intermediate_size=48, hidden_act="silu", _experts_implementation="eager"
    )
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        parameter.normal_(0, 0.2)
    hidden, weights = torch.randn(9, 32), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(9)])  # the last expert has no row
    expected = experts(hidden, chosen, weights)
    assert can_group(experts)
    replace_modules(experts, None, TorchOps(), None)
    assert not list(experts.parameters())
    torch.testing.assert_close(experts(hidden, chosen, weights), expected, rtol=1e-5, atol=1e-5)
    alone = torch.cat([experts(hidden[i : i + 1], chosen[i : i + 1], weights[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-5)


class Router(nn.Module):
    """Reads its layer's weight, as that of LongcatFlash does."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.float(), self.classifier.weight.float())


@torch.inference_mode()
def test_a_module_that_computes_with_a_weight_is_refused_and_one_that_reads_its_dtype_is_not() -> None:
    module = Router()
    replace_modules(module, None, TorchOps(), None)
    weight = module.classifier.weight
    assert (weight.dtype, weight.shape, weight.size(0), weight.dim()) == (torch.float32, (8, 64), 8, 2)
    with pytest.raises(UnservableModel, match="computes with the weight of a linear layer itself"):
        module(torch.randn(3, 64))

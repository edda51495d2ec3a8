"""Norms keep their statistics in float32."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tokenloom.gpu_worker.layers.norm import LayerNorm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (30 * torch.randn(5, 48, generator=generator)).to(dtype)
    reference = LlamaRMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(reference.weight, 1.0, 0.2, generator=generator)
    assert torch.equal(rms_norm(x, reference.weight.detach(), 1e-5), reference(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shifted_norm_equals_gemma_s(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (30 * torch.randn(5, 48, generator=generator)).to(dtype)
    reference = Gemma2RMSNorm(48, eps=1e-5).to(dtype)
    torch.nn.init.normal_(reference.weight, 0.0, 0.2, generator=generator)
    assert torch.equal(rms_norm(x, reference.weight.detach(), 1e-5, 1.0), reference(x))


def test_layer_norm() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    normed = LayerNorm(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([0.0, 0.5, 1.0]), 0.0)(x)
    torch.testing.assert_close(normed, torch.tensor([[-(1.5**0.5), 0.5, 1 + 1.5**0.5]]))
    plain = LayerNorm(None, None, 0.0)(x)
    torch.testing.assert_close(plain, torch.tensor([[-(1.5**0.5), 0.0, 1.5**0.5]]))

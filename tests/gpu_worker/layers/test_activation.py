"""Activations mean what transformers means by their names."""

import pytest
import torch
from transformers.activations import ACT2FN

from tokenloom.gpu_worker.layers.activation import ACTIVATIONS


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)

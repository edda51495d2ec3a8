"""Activations mean what transformers means by their names."""

import pytest
import torch
from transformers.activations import ACT2FN

from tokenloom.gpu_worker.checkpoint.files.architectures import ACTIVATION_NAMES
from tokenloom.gpu_worker.layers.activation import ACTIVATIONS


def test_every_name_that_is_read_has_a_function() -> None:
    assert tuple(ACTIVATIONS) == ACTIVATION_NAMES


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_equals_transformers(name: str) -> None:
    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x), rtol=1e-5, atol=1e-6)

"""Linear layers."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .weights import Checkpoint


class Linear:
    """x · weightᵀ + bias. ``weight`` [out, in], ``bias`` [out] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """[…, in] to […, out]."""
        return F.linear(x, self.weight, self.bias)


def load_linear(
    checkpoint: Checkpoint, names: Sequence[str], inputs: int, outputs: Sequence[int], bias: bool
) -> Linear:
    """The layers ``names``, of ``outputs`` rows each, as one: a single multiplication reads the input once."""
    pairs = list(zip(names, outputs, strict=True))
    weights = [checkpoint.take(f"{name}.weight", rows, inputs) for name, rows in pairs]
    biases = [checkpoint.take(f"{name}.bias", rows) for name, rows in pairs] if bias else []
    return Linear(_merge(weights), _merge(biases) if biases else None)


def load_conv1d(checkpoint: Checkpoint, name: str, inputs: int, outputs: int) -> Linear:
    """GPT-2's linear layer, which is stored as [in, out] and always has a bias."""
    weight = checkpoint.take(f"{name}.weight", inputs, outputs)
    return Linear(weight.t().contiguous(), checkpoint.take(f"{name}.bias", outputs))


def _merge(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

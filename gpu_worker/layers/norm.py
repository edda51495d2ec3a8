"""Normalization layers."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import Checkpoint


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / rms(x) · weight over the last dimension; the statistics are float32 whatever the dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


class LayerNorm:
    """Compute (x - mean) / deviation · weight + bias over the last dimension."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def load_layer_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> LayerNorm:
    return LayerNorm(checkpoint.take(f"{name}.weight", size), checkpoint.take(f"{name}.bias", size), eps)

"""Normalization layers."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import Checkpoint


class RowNorm(NamedTuple):
    """Holds an RMSNorm of rows; see :func:`rms_norm`."""

    weight: Tensor
    """[size]"""
    eps: float
    shift: float


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """Compute x / rms(x) · (weight + shift) over the last dimension; the statistics are float32 whatever the dtype.

    A shifted weight is float32 too, because the sum may not be exact in a shorter dtype.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if shift:
        return (wide * scale * (weight.float() + shift)).to(x.dtype)
    return weight * (wide * scale).to(x.dtype)


class LayerNorm:
    """Compute (x - mean) / deviation · weight + bias over the last dimension; None: without weight, or bias."""

    def __init__(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
        self.weight = weight
        self.bias = bias
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


def load_layer_norm(checkpoint: Checkpoint, name: str, size: int, eps: float) -> LayerNorm:
    return LayerNorm(checkpoint.take(f"{name}.weight", size), checkpoint.take(f"{name}.bias", size), eps)

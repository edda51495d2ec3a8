"""Activation functions by the names that checkpoints use."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.files.architectures import CLAMPED_SWIGLU

_tanh_gelu = partial(F.gelu, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "relu": F.relu,
    "relu2": _squared_relu,
}


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gate · sigmoid(1.702 · gate) · (up + 1), of gates of at most 7 and ups from -7 to 7 (gpt-oss)."""
    alpha, limit = CLAMPED_SWIGLU["swiglu_alpha"], CLAMPED_SWIGLU["swiglu_limit"]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * (gate * alpha).sigmoid())


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return activation(gate) · up, or what :func:`clamped_swiglu` makes of both."""
    return clamped_swiglu(gate, up) if activation == "clamped_swiglu" else ACTIVATIONS[activation](gate) * up

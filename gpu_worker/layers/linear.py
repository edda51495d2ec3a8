"""Loads linear layers, packed for the CPU if that is possible."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.model_config import INT4, INT8_DYNAMIC
from ..checkpoint.weights import Checkpoint
from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import warn_unavailable
from .int8_linear import Int8Linear
from .packed_linear import PackedLinear, can_pack
from .quantized_linear import GROUP, QuantizedLinear
from .quantized_weight import QuantizedWeight, round_to_4_bits, round_to_8_bits


class Linear(Protocol):
    """Computes x · weightᵀ + bias."""

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map [n, in] to [n, out] of ``dtype``, by default the dtype of x."""


class PlainLinear:
    """Computes the product with PyTorch."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        result = F.linear(x, self._weight, self._bias)
        return result if dtype is None else result.to(dtype)


def make_linear(weight: Tensor, bias: Tensor | None = None, quantization: str | None = None) -> Linear:
    """Make a layer of ``weight`` [out, in] and ``bias`` [out] or None; packing, if possible, copies the weight."""
    if quantization == INT8_DYNAMIC:
        return Int8Linear(weight, bias)
    if quantization == INT4 and _can_group(weight):
        return make_quantized(round_to_4_bits(weight), bias, weight.dtype)
    if can_pack(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def make_output(weight: Tensor, quantization: str | None = None) -> Linear:
    """Make the layer of the logits: of 8 bits where the other layers have 4, because every logit counts."""
    if quantization == INT4 and _can_group(weight):
        return make_quantized(round_to_8_bits(weight), None, weight.dtype)
    return make_linear(weight)


def make_quantized(weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
    """Make a layer that computes with the integers of ``weight``, or in ``dtype`` where no kernel can."""
    try:
        return QuantizedLinear(weight, bias)
    except KernelsUnavailable as error:
        warn_unavailable(f"layers of {weight.values.dtype} computed in {dtype}: {error}")
        return make_linear(weight.dequantize(dtype), bias)


def _can_group(weight: Tensor) -> bool:
    """Return whether ``weight`` can be rounded; a layer without content or of odd inputs stays as it is."""
    return weight.device.type == "cpu" and weight.shape[1] % GROUP == 0


def load_linear(
    checkpoint: Checkpoint,
    names: Sequence[str],
    inputs: int,
    outputs: Sequence[int],
    bias: bool,
    quantization: str | None = None,
) -> Linear:
    """Load the layers ``names``, of ``outputs`` rows each, as one layer, so that one product reads the input once."""
    pairs = list(zip(names, outputs, strict=True))
    weights = [checkpoint.take(f"{name}.weight", rows, inputs) for name, rows in pairs]
    biases = [checkpoint.take(f"{name}.bias", rows) for name, rows in pairs] if bias else []
    return make_linear(_merge(weights), _merge(biases) if biases else None, quantization)


def load_conv1d(
    checkpoint: Checkpoint, name: str, inputs: int, outputs: int, quantization: str | None = None
) -> Linear:
    """Load GPT-2's linear layer, which is stored as [in, out] and always has a bias."""
    weight = checkpoint.take(f"{name}.weight", inputs, outputs)
    return make_linear(weight.t().contiguous(), checkpoint.take(f"{name}.bias", outputs), quantization)


def _merge(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

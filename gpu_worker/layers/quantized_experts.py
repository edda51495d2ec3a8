"""Computes the experts of a layer from weights of 4 or 8 bits, all of them in one call."""

from collections.abc import Sequence
from ctypes import addressof, byref
from typing import Any

import torch
from torch import Tensor

from ..kernels.library import ExpertMatrix, ExpertsArgs, load_quantized
from ..kernels.threads import kernel_threads
from .quantized_linear import GROUP, QuantizedLinear

_ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1, "clamped_swiglu": 2}
"""The kernel's numbers. Mirrors ``activate`` in ``activations.h``."""


class QuantizedExperts:
    """Holds the layers of all experts of a layer: to gates and ups, and from their product back."""

    def __init__(self, layers: Sequence[tuple[QuantizedLinear, QuantizedLinear]], activation: str) -> None:
        self._compute = load_quantized().compute_experts
        self._layers = layers  # whose memory the kernel reads
        gate_up, down = layers[0]
        self._matrices = [_matrices([pair[place] for pair in layers]) for place in (0, 1)]
        self._args: dict[str, Any] = {
            "num_experts": len(layers),
            "gate_up": addressof(self._matrices[0]),
            "down": addressof(self._matrices[1]),
            "hidden": gate_up.shape[1],
            "inner": down.shape[1],
            "gate_up_groups_per_scale": gate_up.packed.groups_per_scale,
            "down_groups_per_scale": down.packed.groups_per_scale,
            "kind": gate_up.packed.kind,
            "activation": _ACTIVATIONS[activation],
        }

    @classmethod
    def of(cls, layers: Sequence[tuple[object, object]], activation: str) -> "QuantizedExperts | None":
        """Return the experts of these layers; None: the kernel does not compute them together."""
        pairs = [
            (first, second)
            for first, second in layers
            if isinstance(first, QuantizedLinear) and isinstance(second, QuantizedLinear)
        ]
        kinds = {(*_kind(first), *_kind(second)) for first, second in pairs}
        if len(pairs) < len(layers) or len(kinds) != 1 or activation not in _ACTIVATIONS:
            return None
        gate_up, down = pairs[0]
        (outputs, hidden), (back, inner) = gate_up.shape, down.shape
        fits = outputs == 2 * inner and back == hidden and hidden % GROUP == inner % GROUP == 0
        same = gate_up.packed.kind == down.packed.kind and _kind(gate_up)[2] == _kind(down)[2]
        return cls(pairs, activation) if fits and same else None

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of what the experts ``chosen`` [T, k] compute of x, times ``weights``
        [T, k]. A row depends on no other."""
        assert x.is_cpu, "this kernel reads memory of the host"
        x, weights, chosen = x.contiguous(), weights.float().contiguous(), chosen.contiguous()
        out = torch.empty_like(x)
        args = ExpertsArgs(
            rows=x.data_ptr(),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            out=out.data_ptr(),
            num_rows=len(x),
            per_token=chosen.shape[1],
            is_bf16=x.dtype == torch.bfloat16,
            num_threads=kernel_threads(),
            **self._args,
        )
        self._compute(byref(args))
        return out


def _kind(layer: QuantizedLinear) -> tuple[int, int, bool]:
    packed = layer.packed
    return packed.kind, packed.groups_per_scale, packed.offsets is not None


def _matrices(layers: Sequence[QuantizedLinear]) -> Any:
    """Return where the kernel finds each layer's numbers."""
    found = (ExpertMatrix * len(layers))()
    for to, layer in zip(found, layers, strict=True):
        packed = layer.packed
        to.bytes, to.scales = packed.matrix.data_ptr(), packed.scales.data_ptr()
        to.offsets = None if packed.offsets is None else packed.offsets.data_ptr()
        to.bias = None if layer.bias is None else layer.bias.data_ptr()
        to.factor, to.least = packed.factor, packed.least
    return found

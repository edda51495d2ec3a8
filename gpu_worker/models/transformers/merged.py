"""Computes linear layers of transformers' modules that read the same input as one product, and gated MLPs whole."""

import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.activation import ACTIVATIONS
from ...layers.linear import Linear, make_linear
from ...ops.ops import Ops
from .probe import UnservableModel

_READABLE = {
    Tensor.size,
    Tensor.dim,
    Tensor.__repr__,
    *(
        getattr(Tensor, name).__get__
        for name in ("dtype", "device", "shape", "ndim", "is_meta", "is_mkldnn", "requires_grad")
    ),
}


class AbsentWeight(Tensor):
    """Has a shape, a dtype and a device, but no values: a module that computes with it is refused.

    Without this, a product with it would return what happens to be in memory.
    """

    @classmethod
    def like(cls, tensor: Tensor) -> "AbsentWeight":
        """Return the stand-in of ``tensor``. Its device is ``meta``."""
        return torch.empty_like(tensor, device="meta", requires_grad=False).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function not in _READABLE:
            raise UnservableModel("computes with the weight of a linear layer itself, instead of calling the layer")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


_MLP = ("gate_proj", "up_proj")
_TOGETHER = (("q_proj", "k_proj", "v_proj"), _MLP)
"""Names of a module's layers that read the same input."""


class MergedLinear:
    """Computes several layers at the first call for an input, and keeps the result until each has taken its part.

    A layer that is called with another input than the others still gets its own product, at the cost of all.
    """

    def __init__(self, linear: Linear, sizes: Sequence[int]) -> None:
        """``linear`` has the outputs of all layers, of which each has one of ``sizes``."""
        self.linear = linear
        ends = itertools.accumulate(sizes)
        self._columns = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._input: Tensor | None = None
        self._result: Tensor | None = None
        self._waiting: set[int] = set()

    def part(self, index: int, x: Tensor) -> Tensor:
        """Return the output [..., size] of layer ``index`` for x [..., in]."""
        # Before projections were merged, a Llama of 8 layers took 1.36 times the CPU of the built-in decoder for one
        # request, and takes 1.29 now, mostly in calls.
        if x is not self._input or index not in self._waiting:
            result = self.linear(x.reshape(-1, x.shape[-1]))
            self._input, self._result = x, result.view(*x.shape[:-1], result.shape[-1])
            self._waiting = set(range(len(self._columns)))
        assert self._result is not None
        found = self._result[..., self._columns[index]]
        self._waiting.discard(index)
        if not self._waiting:
            self._input = self._result = None
        return found


class MergedPart(nn.Module):
    """Replaces one of the merged layers."""

    def __init__(self, merged: MergedLinear, index: int, layer: nn.Linear) -> None:
        super().__init__()
        self.__dict__["merged"] = merged
        self._index = index
        self.out_features, self.in_features = layer.weight.shape
        self.weight = AbsentWeight.like(layer.weight)
        self.bias = None if layer.bias is None else AbsentWeight.like(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        merged: MergedLinear = self.__dict__["merged"]
        return merged.part(self._index, x)


class _GatedForward:
    """Computes down(activation(gate(x)) * up(x)) in place of a module's own forward pass."""

    def __init__(self, module: nn.Module, merged: MergedLinear, activation: str, ops: Ops) -> None:
        self._module = module
        self._merged = merged
        self._activation = activation
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        gated = self._ops.gate(self._merged.linear(x.reshape(-1, x.shape[-1])), self._activation)
        down: nn.Module = self._module._modules["down_proj"]  # type: ignore[assignment]
        result: Tensor = down(gated)
        return result.view(*x.shape[:-1], result.shape[-1])


def merge_layers(module: nn.Module, quantization: str | None, ops: Ops) -> None:
    """Merge those layers of ``module`` that read the same input; ``quantization`` is that of :func:`make_linear`."""
    for names in _TOGETHER:
        layers = [module._modules.get(name) for name in names]
        if not _can_merge(layers):
            continue
        activation = _activation(module) if names == _MLP else None
        merged = _merge(layers, quantization)
        for index, (name, layer) in enumerate(zip(names, layers, strict=True)):
            assert isinstance(layer, nn.Linear)
            setattr(module, name, MergedPart(merged, index, layer))
        if activation is not None:
            module.__dict__["forward"] = _GatedForward(module, merged, activation, ops)


def _can_merge(layers: Sequence[nn.Module | None]) -> bool:
    if any(type(layer) is not nn.Linear for layer in layers):
        return False
    linears: list[Any] = list(layers)
    kinds = {(layer.in_features, layer.bias is None, layer.weight.dtype, layer.weight.device) for layer in linears}
    return len(kinds) == 1


def _merge(layers: Sequence[Any], quantization: str | None) -> MergedLinear:
    weight = torch.cat([layer.weight.detach() for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    return MergedLinear(make_linear(weight, bias, quantization), [layer.out_features for layer in layers])


def _activation(module: Any) -> str | None:
    """Return the activation of a gated MLP, or None if ``module`` computes anything else."""
    children = dict(module.named_children())
    if children.keys() - {"act_fn"} != {*_MLP, "down_proj"} or type(children["down_proj"]) is not nn.Linear:
        return None
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = module.gate_proj.weight
    x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
    expected, gate, up = module(x), module.gate_proj(x), module.up_proj(x)
    # The name of a module's class proves nothing, so its own result decides: the fused operation replaces only what it
    # equals bit for bit.
    for name, function in ACTIVATIONS.items():
        if torch.equal(module.down_proj(function(gate) * up), expected):
            return name
    return None

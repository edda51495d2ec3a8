"""Stands for weights that a checkpoint stores in few bits while transformers loads it, so that its renaming, stacking
and joining of tensors need not know how they are stored, and a layer of ours can keep them as they are."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ...checkpoint.files.quantized_weight import PackedWeight, fill_rows
from ...checkpoint.weights import WeightSource
from ...layers.linear import Linear, make_linear, make_packed

_aten = torch.ops.aten


class _Together(NamedTuple):
    """Holds the weights that one was made of."""

    parts: Sequence["StoredWeight"]
    dim: int
    is_stack: bool
    """Whether they are stacked along a new dimension, instead of joined along one that they have."""


class StoredWeight(Tensor):
    """Has the shape, the dtype and the device of the unpacked weight, and no memory. What is computed with it is
    computed with the unpacked weight, which is made each time."""

    made_of: PackedWeight | _Together

    @staticmethod
    def make(made_of: PackedWeight | _Together, shape: Sequence[int], dtype: torch.dtype) -> "StoredWeight":
        weight: StoredWeight = Tensor._make_wrapper_subclass(StoredWeight, tuple(shape), dtype=dtype)
        weight.made_of = made_of
        return weight

    def unpacked(self) -> Tensor:
        """Return the weight in its dtype, in memory of its own."""
        if not isinstance(self.made_of, _Together):
            return fill_rows(self.made_of, self.dtype, self.device)
        parts = [part.unpacked() for part in self.made_of.parts]
        return torch.stack(parts, self.made_of.dim) if self.made_of.is_stack else torch.cat(parts, self.made_of.dim)

    def packed(self) -> list[PackedWeight]:
        """Return the packed weights whose outputs follow each other in this one; empty if it is made otherwise."""
        if not isinstance(self.made_of, _Together):
            return [self.made_of]
        if self.made_of.is_stack or self.made_of.dim:
            return []
        each = [part.packed() for part in self.made_of.parts]
        return [weight for weights in each for weight in weights] if all(each) else []

    def first(self, index: int) -> Tensor:
        """Return ``self[index]``, the matrix of one expert, packed where the experts were stacked."""
        if isinstance(self.made_of, _Together):
            parts, dim, is_stack = self.made_of
            if is_stack and dim == 0:
                return parts[index]
            each = [part.first(index) for part in parts] if dim else []
            if each and not is_stack:
                return torch.cat(each, dim - 1)
        return self[index]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in (_aten.detach.default, _aten.alias.default):
            return cls.make(args[0].made_of, args[0].shape, args[0].dtype)
        is_stack = function == _aten.stack.default
        if (is_stack or function == _aten.cat.default) and all(isinstance(part, cls) for part in args[0]):
            return cls._together(args[0], args[1] if len(args) > 1 else 0, is_stack=is_stack)
        args, kwargs = tree_map_only(cls, cls.unpacked, (args, dict(kwargs or {})))
        return function(*args, **kwargs)

    @classmethod
    def _together(cls, parts: Sequence[Self], dim: int, *, is_stack: bool) -> "StoredWeight":
        with torch.device("meta"):
            empty = [torch.empty(part.shape) for part in parts]
        shape = (torch.stack if is_stack else torch.cat)(empty, dim).shape
        return cls.make(_Together(list(parts), dim % len(shape), is_stack), shape, parts[0].dtype)


_OF_AN_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")


def read_state(source: WeightSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by their names; those that are packed have ``dtype`` once unpacked. Matrices
    of experts that are named as parts of one tensor (``experts.3.down_proj``) are stacked."""
    state: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name in source.names:
        each = source.read(name, ())
        tensor = each if isinstance(each, Tensor) else StoredWeight.make(each, each.shape, dtype)
        if (part := _OF_AN_EXPERT.fullmatch(name)) is None:
            state[name] = tensor
        else:
            stacks.setdefault(f"{part[1]}.{part[3]}", {})[int(part[2])] = tensor
    return state | {name: torch.stack([parts[each] for each in sorted(parts)]) for name, parts in stacks.items()}


def make_layer(weight: Tensor, bias: Tensor | None, quantization: str | None) -> Linear:
    """Make a layer of ``weight`` [out, in], which keeps it as it is stored where a kernel computes with that, unless
    ``quantization`` names another way or the model computes in float32."""
    if not isinstance(weight, StoredWeight):
        return make_linear(weight, bias, quantization)
    packed = weight.packed() if quantization is None and weight.dtype != torch.float32 else []
    layer = make_packed(packed, bias, weight.device) if packed else None
    return make_linear(weight.unpacked(), bias, quantization) if layer is None else layer


def unpack_rest(model: torch.nn.Module) -> None:
    """Unpack the weights that no layer of ours has taken."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            if isinstance(weight, StoredWeight):
                setattr(module, name, torch.nn.Parameter(weight.unpacked(), requires_grad=False))

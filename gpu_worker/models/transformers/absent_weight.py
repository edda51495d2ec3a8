"""Stands for the weights of replaced layers, whose dtype and device some modules read."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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

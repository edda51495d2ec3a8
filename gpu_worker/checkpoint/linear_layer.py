"""Defines what a model needs of a linear layer."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor


class Linear(Protocol):
    """Computes x · weightᵀ + bias."""

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Map [n, in] to [n, out] of ``dtype``, by default the dtype of x."""


@runtime_checkable
class Unpackable(Protocol):
    """A layer whose weight is an unquantized matrix, however it is packed."""

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]; it must not be changed."""


Adapt: TypeAlias = Callable[[Linear, Sequence[str], int, Sequence[int], torch.dtype], Linear]
"""Wraps a layer that consists of the layers of these names, with so many inputs and each with so many outputs of this
dtype, so that LoRA adapters can change it."""

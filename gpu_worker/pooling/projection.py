"""Projections of pooled states: dense layers of sentence-transformers and class heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


def same(x: Tensor) -> Tensor:
    """Return ``x``."""
    return x


@dataclass(frozen=True, slots=True)
class Projection:
    """Computes then(x · weightᵀ + bias) in float32, whatever the dtype of the model is."""

    weight: Tensor
    bias: Tensor | None
    then: Callable[[Tensor], Tensor] = same

    def __call__(self, x: Tensor) -> Tensor:
        """Map [..., in] to [..., out]."""
        return self.then(F.linear(x, self.weight.float(), None if self.bias is None else self.bias.float()))


def project(x: Tensor, projections: Sequence[Projection]) -> Tensor:
    """Apply projections one after the other."""
    for each in projections:
        x = each(x)
    return x

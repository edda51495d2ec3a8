"""Computes the experts of a layer with one product per expert that has rows, instead of a loop over masks."""

from typing import Any

import torch
from torch import Tensor, nn

from ...layers.linear import Linear, make_linear


class GroupedExperts:
    """Holds the matrices of a layer's experts as our linear layers."""

    def __init__(self, module: Any, quantization: str | None) -> None:
        self._module = module
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self._first = self._take(first, quantization)
        self._down = self._take("down_proj", quantization)

    @classmethod
    def take_over(cls, module: nn.Module, quantization: str | None) -> None:
        """Compute the forward pass of ``module``, an experts module of transformers, and hold its weights."""
        experts = cls(module, quantization)
        module.__dict__["forward"] = experts.forward

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of each token's experts [T, k], weighted."""
        tokens, order, counts = self._sort(top_k_index)
        rows = hidden[tokens]
        out = torch.zeros_like(rows)
        begin = 0
        for expert, count in enumerate(counts):
            if count:
                out[begin : begin + count] = self._compute(expert, rows[begin : begin + count])
                begin += count
        weighted = out * top_k_weights.reshape(-1)[order, None]
        total = torch.zeros(hidden.shape, dtype=weighted.dtype, device=hidden.device)
        return total.index_add_(0, tokens, weighted).to(hidden.dtype)

    def _sort(self, top_k_index: Tensor) -> tuple[Tensor, Tensor, list[int]]:
        """Return the token of each row, sorted by expert; the order [T * k] that sorts them; the rows per expert."""
        experts = top_k_index.reshape(-1)
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=len(self._down)).tolist()
        return order // top_k_index.shape[-1], order, counts[: len(self._down)]

    def _compute(self, expert: int, rows: Tensor) -> Tensor:
        module = self._module
        inner = self._first[expert](rows)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        result = self._down[expert](inner)
        return module.post_expert_norm(result) if module.has_post_expert_norm else result

    def _take(self, name: str, quantization: str | None) -> list[Linear]:
        """Make a layer of each expert's matrix and drop the tensor that held them all."""
        module = self._module
        weights = getattr(module, name).detach()
        biases = getattr(module, f"{name}_bias").detach() if module.has_bias else [None] * len(weights)
        linears = []
        for weight, bias in zip(weights, biases, strict=True):
            matrix = weight.t() if module.is_transposed else weight
            linears.append(make_linear(matrix.contiguous(), bias, quantization))
        delattr(module, name)
        return linears


def can_group(module: Any) -> bool:
    """Return whether ``module`` holds its experts as transformers' grouped products expect them."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed") or not hasattr(module, "_apply_gate"):
        return False
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    return isinstance(first, Tensor) and first.dim() == 3

"""Computes the experts of a layer with one product per expert that has rows, instead of a loop over masks."""

from typing import Any

import torch
from torch import Tensor, nn

from ...layers.expert_routes import ExpertRoutes, LayerRoutes
from ...layers.linear import Linear
from ...parallel.experts.grouped_rows import GroupedRows, mix_experts
from .division import group_of
from .stored_weights import StoredWeight, make_layer

_ATTRIBUTE = "tokenloom_experts"


class ModuleExperts:
    """Holds the matrices of a layer's experts as our linear layers.

    Attributes:
        choice: The shape of the experts that were chosen last, [T, k]; empty before the first pass.
        routes: Records which experts are chosen, if given.
        shapes: The name of each matrix, and its outputs and inputs.
    """

    def __init__(self, module: Any, quantization: str | None) -> None:
        self._module = module
        self._group = group_of(module)
        self.choice: tuple[int, ...] = ()
        self.routes: LayerRoutes | None = None
        self.shapes: list[tuple[str, tuple[int, int]]] = []
        first = "gate_up_proj" if module.has_gate else "up_proj"
        self._first = self._take(first, quantization)
        self._down = self._take("down_proj", quantization)

    @classmethod
    def take_over(cls, module: nn.Module, quantization: str | None) -> None:
        """Compute the forward pass of ``module``, an experts module of transformers, and hold its weights."""
        experts = cls(module, quantization)
        module.__dict__[_ATTRIBUTE] = experts
        module.__dict__["forward"] = experts.forward

    @property
    def count(self) -> int:
        """Return how many experts the layer has."""
        return len(self._down)

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of each token's experts [T, k], weighted."""
        grouped = GroupedRows.sort(top_k_index)
        self.choice = tuple(top_k_index.shape)
        if self.routes is not None:
            self.routes.record(top_k_index, grouped)
        mixed = mix_experts(hidden, grouped, top_k_weights, self._compute)
        return mixed if self._group is None else self._group.all_reduce(mixed)

    def _compute(self, expert: int, rows: Tensor) -> Tensor:
        if expert >= len(self._down):  # some routers choose a number that stands for no expert
            return torch.zeros_like(rows)
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
        for expert, bias in enumerate(biases):
            weight = weights.first(expert) if isinstance(weights, StoredWeight) else weights[expert]
            matrix = weight.t() if module.is_transposed else weight
            self.shapes.append((f"{name}.{expert}", (matrix.shape[0], matrix.shape[1])))
            linears.append(make_layer(matrix.contiguous(), bias, quantization))
        delattr(module, name)
        return linears


def can_group(module: Any) -> bool:
    """Return whether ``module`` holds its experts as transformers' grouped products expect them."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed") or not hasattr(module, "_apply_gate"):
        return False
    first = getattr(module, "gate_up_proj" if module.has_gate else "up_proj", None)
    return isinstance(first, Tensor) and first.dim() == 3


def routes_of_modules(model: nn.Module, num_tokens: int) -> ExpertRoutes | None:
    """Return what records the choices of a model's experts, after a forward pass of ``num_tokens`` tokens.

    Returns None for a model without grouped experts, and for one whose layers choose different numbers of experts.
    """
    layers = [module.__dict__[_ATTRIBUTE] for module in model.modules() if _ATTRIBUTE in module.__dict__]
    choices = {layer.choice for layer in layers}
    if len(choices) != 1 or len(choice := choices.pop()) != 2 or choice[0] != num_tokens:
        return None
    routes = ExpertRoutes(max(layer.count for layer in layers), choice[1], len(layers))
    for layer, layer_routes in zip(layers, routes.layers, strict=True):
        layer.routes = layer_routes
    return routes

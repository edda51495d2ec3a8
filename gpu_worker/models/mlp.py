"""Computes the MLP of a decoder's layer."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..checkpoint.layer_state import LayerState, Movable
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.weights import Checkpoint, Linear
from ..layers.activation import ACTIVATIONS
from ..layers.linear import load_linear
from ..ops.ops import Ops
from ..parallel.sharding import joined


@dataclass(frozen=True, slots=True)
class MLPNames:
    """Holds how a checkpoint names the matrices of an MLP."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class MLP:
    """Computes down(act(gate(x)) · up(x)), with gate and up as one product."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        config: ModelConfig,
        ops: Ops,
        size: int = 0,
        names: MLPNames = MLPNames(),
        *,
        sums: bool = True,
    ) -> None:
        """``size``: what gate and up lead to; 0: the model's intermediate size. ``sums``: as in
        :func:`~..layers.linear.load_linear`."""
        hidden, inner = config.hidden_size, config.shard.part(size or config.intermediate_size)
        is_fused = config.traits.is_fused
        if config.traits.has_fused_mlp and ".experts." not in prefix:  # GGUF files hold the two parts
            is_fused = f"{prefix}.gate_up_proj.weight" in checkpoint
        parts = ([f"{prefix}.{names.gate}", f"{prefix}.{names.up}"], (inner, inner))
        stored, outputs = ([f"{prefix}.gate_up_proj"], (joined((inner, inner)),)) if is_fused else parts
        bias, quantization = config.mlp_bias, config.quantization
        self._gate_up = load_linear(checkpoint, stored, hidden, outputs, bias, quantization)
        self._down = load_linear(checkpoint, [f"{prefix}.{names.down}"], inner, [hidden], bias, quantization, sums=sums)
        self.activation = config.hidden_act
        self._ops = ops

    @property
    def layers(self) -> tuple[Linear, Linear]:
        """Return the layers to gates and ups, and from their product back."""
        return self._gate_up, self._down

    def states(self) -> list[LayerState]:
        """Return the weights of gate and up, and of down, as they are packed. Raises ``ValueError`` for layers that do
        not move."""
        return [_movable(linear).state() for linear in self.layers]

    def with_states(self, states: Sequence[LayerState]) -> "MLP":
        """Return the same MLP of other weights, as :meth:`states`. Raises ``ValueError`` if they do not fit."""
        gate_up, down = states
        return self.with_layers(_movable(self._gate_up).with_state(gate_up), _movable(self._down).with_state(down))

    def with_layers(self, gate_up: Linear, down: Linear) -> "MLP":
        """Return the same MLP of other layers, as :attr:`layers`."""
        other = copy.copy(self)
        other._gate_up, other._down = gate_up, down
        return other

    def take(self, other: "MLP") -> None:
        """Use the weights of another MLP of the same shape, which nothing else uses."""
        self._gate_up = _movable(self._gate_up).take(other._gate_up)
        self._down = _movable(self._down).take(other._down)

    def inner(self, x: Tensor) -> Tensor:
        """Return what goes into the layer back."""
        return self._ops.gated(self._gate_up, x, self.activation)

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._ops.gated(self._gate_up, x, self.activation))


class GivenMLP:
    """Computes an expert, as adapters change it, from what the weights of its layers gave elsewhere."""

    def __init__(self, like: MLP, wrap: Callable[[Sequence[Linear]], Sequence[Linear]]) -> None:
        """``like``: of the same shape. ``wrap``: returns the two layers so that adapters change them."""
        self._gate_up, self._down = _GivenOutputs(), _GivenOutputs()
        gate_up, down = wrap((self._gate_up, self._down))
        self.mlp = like.with_layers(gate_up, down)

    def inner(self, x: Tensor, outputs: Tensor) -> Tensor:
        """Return what goes into the second layer, of x [n, hidden_size] and the first one's ``outputs``, which it may
        change."""
        self._gate_up.outputs = outputs
        return self.mlp.inner(x)

    def down(self, inner: Tensor, outputs: Tensor) -> Tensor:
        """Return what the second layer computes, of what goes into it and its ``outputs``, which it may change."""
        self._down.outputs = outputs
        return self.mlp.layers[1](inner)


class _GivenOutputs:
    """Fulfils :class:`..checkpoint.weights.Linear` with outputs that were computed elsewhere."""

    def __init__(self) -> None:
        self.outputs = torch.empty(0)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        outputs, self.outputs = self.outputs, torch.empty(0)
        return outputs if dtype is None else outputs.to(dtype)


class UngatedMLP:
    """Computes down(act(up(x))) (Nemotron-H)."""

    def __init__(self, checkpoint: Checkpoint, prefix: str, config: ModelConfig, ops: Ops) -> None:
        hidden, inner = config.hidden_size, config.shard.part(config.intermediate_size)
        bias, quantization = config.mlp_bias, config.quantization
        self._up = load_linear(checkpoint, [f"{prefix}.up_proj"], hidden, [inner], bias, quantization)
        self._down = load_linear(checkpoint, [f"{prefix}.down_proj"], inner, [hidden], bias, quantization)
        self._activation = ops.rowwise(ACTIVATIONS[config.hidden_act])

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._activation(self._up(x)))


def _movable(linear: Linear) -> Movable:
    if not isinstance(linear, Movable):
        raise ValueError(f"enable_eplb: layers of {type(linear).__name__} are not moved; leave it out")
    return linear

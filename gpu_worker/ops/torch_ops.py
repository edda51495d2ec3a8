"""Runs the operations with PyTorch, rounding as transformers does."""

from collections.abc import Callable
from functools import cached_property

from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..attention.latent_backend import per_head
from ..checkpoint.weights import Linear
from ..layers.activation import gated
from ..layers.norm import rms_norm
from ..layers.rotary import rotate, rotation
from .ops import HeadNorm, Layer, LayerParts, Rotation
from .state_ops import StateOps


class TorchOps:
    """Fulfils :class:`~.ops.Ops` on every device."""

    def __init__(self, num_kv_heads: int = 0, states: StateOps | None = None) -> None:
        """``num_kv_heads``: among the heads that are rotated; 0: as many as the KV cache has. ``states``: of the layers
        that keep a state; None: PyTorch's."""
        self._num_kv_heads = num_kv_heads
        self._state_ops = states

    @cached_property
    def states(self) -> StateOps:
        return self._state_ops or StateOps()

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0
    ) -> Tensor:
        if delta is not None:
            residual += delta
        return rms_norm(residual, weight, eps, shift)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return gated(gate, up, activation)

    def gated(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        return self.gate(linear(x), activation)

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()

    def rowwise(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return function

    def per_head(self, matrices: Tensor) -> Callable[[Tensor], Tensor]:
        return per_head(matrices)

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        return rotation(positions, frequencies, factor)

    def fused(self, layer: Layer, parts: LayerParts) -> Layer:
        return layer

    def rotate_and_write(
        self,
        heads: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        num_kv_heads = self._num_kv_heads or kv_cache.shape[2]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        query_key, value = heads[:, :-num_kv_heads], heads[:, -num_kv_heads:]
        if norm is not None:
            query_key = rms_norm(query_key, norm.weights, norm.eps, norm.shift)
        query_key = rotate(query_key, *rotation)
        plan.write_kv(query_key[:, num_heads:], value, kv_cache)
        return query_key[:, :num_heads]

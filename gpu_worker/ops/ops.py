"""Defines the operations of a decoder layer that are worth fusing. Models call these, and depend on no backend."""

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache, ScoreRule
from ..checkpoint.weights import Linear
from ..layers.norm import RowNorm
from .state_ops import StateOps

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines of a step, each [T, 1, head_size / 2] float32."""


class HeadNorm(NamedTuple):
    """Holds an RMSNorm of each query and key head."""

    weights: Tensor
    """[num_heads + num_kv_heads, head_size]."""
    eps: float
    shift: float = 0.0
    """What is added to each weight."""


class LayerParts(NamedTuple):
    """Holds what a decoder layer consists of that is attention and an MLP, each after a norm."""

    norms: tuple[RowNorm, RowNorm]
    """Before attention, and before the MLP."""
    attention: tuple[Linear, Linear]
    """To queries, keys and values, and from what they find back."""
    mlp: tuple[Linear, Linear]
    """To gates and ups, and from their product back."""
    activation: str
    head_norm: HeadNorm | None
    head_size: int
    rule: ScoreRule


Layer = TypeVar("Layer", bound=Callable[..., Tensor | None])


class Ops(Protocol):
    """Computes the operations. It holds no state, so every layer shares one."""

    @property
    def states(self) -> StateOps:
        """The operations of layers that keep a state between tokens."""

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0
    ) -> Tensor:
        """Add ``delta``, if it is not None, to ``residual`` in place; both [T, hidden_size].

        Returns residual / rms(residual) · (weight + shift).
        """

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(gate) · up, [T, size], of [T, 2 * size] concatenated gates and ups; ``clamped_swiglu``
        changes both."""

    def gated(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        """Return :meth:`gate` of what ``linear``, whose outputs are gates and ups, computes of x [T, in]."""

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x · sigmoid(gate) of [T, size] rows and gates [T, size], or [T, 1]."""

    def rowwise(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what computes ``function`` of each element of [n, ...]: the function itself, or in a way that gives a
        row the same bits whatever the other rows are. Layers ask for it when they load."""

    def per_head(self, matrices: Tensor) -> Callable[[Tensor], Tensor]:
        """Return what multiplies [T, heads, in] by ``matrices`` [heads, in, out], to [T, heads, out]."""

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        """Return the cosines and sines, times ``factor``, of the angles that ``frequencies`` [head_size / 2] float32
        give to each of the positions [T] int64."""

    def rotate_and_write(
        self,
        heads: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Rotate queries and keys, after ``norm`` if there is one, and write the KV.

        ``heads`` [T, num_heads + 2 * num_kv_heads, head_size] are queries, keys, values, and may be overwritten. A
        rotation of fewer than head_size / 2 angles turns the first dimensions of a head alone.
        Returns the queries, [T, num_heads, head_size].
        """

    def fused(self, layer: Layer, parts: LayerParts) -> Layer:
        """Return what computes a layer of these parts in fewer calls, or the layer itself. What it returns may be None:
        then all is added to the residual stream already."""

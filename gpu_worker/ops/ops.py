"""Defines the operations of a decoder layer that are worth fusing. Models call these and know no backend."""

from typing import Protocol

from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache

Rotation = tuple[Tensor, Tensor]
"""The cosines and sines of a step, each [T, 1, head_size / 2] float32."""


class Ops(Protocol):
    """Computes the operations. It holds no state, so every layer shares one."""

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """Add ``delta``, if it is not None, to ``residual`` in place; both [T, hidden_size].

        Returns residual / rms(residual) · weight.
        """

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        """Return activation(gate) · up, [T, size], of [T, 2 * size] concatenated gates and ups."""

    def rotate_and_write(
        self,
        heads: Tensor,
        norm: tuple[Tensor, float] | None,
        rotation: Rotation,
        kv_cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        """Rotate queries and keys, after an RMSNorm of each head if ``norm`` is (weights, eps), and write the KV.

        ``heads`` [T, num_heads + 2 * num_kv_heads, head_size] are queries, keys, values, and may be overwritten; the
        norm's weights are a row for each query and key head. Returns the queries, [T, num_heads, head_size].
        """

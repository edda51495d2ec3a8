"""Runs the operations as Triton kernels on a GPU."""

from typing import Any, cast

import torch
from torch import Tensor

from ..attention.attention_backend import FP8_KV, AttentionPlan, KVCache
from ..checkpoint.weights import Linear
from ..kernels.triton.kv_cache import rotate_and_write
from ..kernels.triton.launch import launch, power_of_2
from ..kernels.triton.products import gate
from ..kernels.triton.rows import add_norm
from ..layers.fp8_linear import Fp8Linear
from ..layers.triton_linear import KINDS, TritonLinear, are_few, multiply_few
from .ops import HeadNorm, Layer, LayerParts, Rotation
from .torch_ops import TorchOps

_HEADS = 8
"""Heads that one program rotates."""
_GATE_WIDTH = 1024
_FUSED = (torch.bfloat16,)
"""In float16 rows that are multiplied by the weights of a norm before they are scaled could be infinite."""


class TritonOps(TorchOps):
    """Fulfils :class:`~.ops.Ops` for float32, float16 and bfloat16."""

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0
    ) -> Tensor:
        assert residual.is_contiguous()
        assert delta is None or delta.is_contiguous()
        out = torch.empty_like(residual)
        width = power_of_2(residual.shape[1])
        launch(
            add_norm,
            (residual.shape[0],),
            residual,
            residual if delta is None else delta,
            weight,
            out,
            residual.shape[1],
            eps,
            shift,
            HAS_DELTA=delta is not None,
            HAS_SHIFT=shift != 0.0,
            WIDTH=width,
            num_warps=min(16, max(1, width // 512)),
        )
        return out

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in KINDS:
            return super().gate(gate_up, activation)
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        grid = (rows, -(-size // _GATE_WIDTH))
        launch(gate, grid, gate_up, out, size, KIND=KINDS[activation], WIDTH=_GATE_WIDTH, num_warps=4)
        return out

    def gated(self, linear: Linear, x: Tensor, activation: str) -> Tensor:
        if activation in KINDS and isinstance(linear, (TritonLinear, Fp8Linear)) and linear.takes(x):
            return linear.gated(x, activation)
        return super().gated(linear, x, activation)

    def fused(self, layer: Layer, parts: LayerParts) -> Layer:
        linears = (*parts.attention, *parts.mlp)
        if parts.activation not in KINDS or not all(isinstance(each, (TritonLinear, Fp8Linear)) for each in linears):
            return layer
        return cast(Layer, FewRowsLayer(layer, parts, self))

    def rotate_and_write(
        self,
        heads: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        if 2 * rotation[0].shape[2] < heads.shape[2]:
            return super().rotate_and_write(heads, norm, rotation, kv_cache, plan)
        assert heads.is_contiguous()
        assert rotation[0].is_contiguous()
        assert rotation[1].is_contiguous()
        num_tokens, num_all, head = heads.shape
        num_kv_heads, block_size, cache_head = kv_cache.shape[2:]
        num_heads = num_all - 2 * num_kv_heads
        weights, eps, shift = norm if norm is not None else (heads, 0.0, 0.0)
        launch(
            rotate_and_write,
            (num_tokens, -(-num_all // _HEADS)),
            heads,
            weights,
            *rotation,
            plan.slots_of(kv_cache),
            *kv_cache.unbind(),
            eps,
            shift,
            num_heads,
            num_kv_heads,
            HAS_NORM=norm is not None,
            HEAD=head,
            CACHE_HEAD=cache_head,
            PADDED_HALF=power_of_2(head // 2),
            BLOCK=block_size,
            HEADS=_HEADS,
            IS_FP8=kv_cache.dtype == FP8_KV,
            num_warps=4,
        )
        return heads[:, :num_heads]


class FewRowsLayer:
    """Computes a decoder layer of few rows with six kernels: products normalize the rows that they read, and add what
    they find to the residual stream. Of more rows it computes the layer as it is."""

    def __init__(self, layer: Any, parts: LayerParts, ops: TritonOps) -> None:
        self._layer = layer
        self._parts = parts
        self._ops = ops
        self.mlp = layer.mlp

    def __call__(
        self, residual: Tensor, delta: Tensor | None, rotation: Rotation, kv_cache: KVCache, plan: AttentionPlan
    ) -> Tensor | None:
        """Take and return what the layer does; None: nothing is left to be added to ``residual``."""
        if not are_few(residual) or residual.dtype not in _FUSED:
            delta = self._layer(residual, delta, rotation, kv_cache, plan)
            return delta
        if delta is not None:
            residual += delta
        parts = self._parts
        (qkv, out), (gate_up, down) = (_stored(pair) for pair in (parts.attention, parts.mlp))
        heads = multiply_few(residual, *qkv, norm=parts.norms[0]).view(len(residual), -1, parts.head_size)
        query = self._ops.rotate_and_write(heads, parts.head_norm, rotation, kv_cache, plan)
        multiply_few(plan.attend(query, kv_cache, parts.rule).flatten(1), *out, into=residual)
        inner = multiply_few(residual, *gate_up, KINDS[parts.activation], norm=parts.norms[1])
        multiply_few(inner, *down, into=residual)
        return None


def _stored(linears: tuple[Linear, Linear]) -> list[tuple[Tensor, Tensor | None, Tensor | None]]:
    """Return weight, scales and bias of each."""
    return [each.stored for each in linears if isinstance(each, (TritonLinear, Fp8Linear))]

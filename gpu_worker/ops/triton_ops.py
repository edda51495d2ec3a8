"""Runs the operations as Triton kernels on a GPU."""

import torch
from torch import Tensor

from ..attention.attention_backend import FP8_KV, AttentionPlan, KVCache
from ..checkpoint.weights import Linear
from ..kernels.triton.kv_cache import rotate_and_write
from ..kernels.triton.launch import launch, power_of_2
from ..kernels.triton.products import gate
from ..kernels.triton.rows import add_norm
from ..layers.fp8_linear import Fp8Linear
from ..layers.triton_linear import KINDS, TritonLinear
from .ops import HeadNorm, Rotation
from .torch_ops import TorchOps

_HEADS = 8
"""Heads that one program rotates."""
_GATE_WIDTH = 1024


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

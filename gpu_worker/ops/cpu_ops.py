"""Runs the operations as C++ kernels: each reads its data once and computes in float32 between load and store; and
chooses the operations that go with an attention backend."""

from collections.abc import Callable
from ctypes import byref
from functools import cached_property

import torch
from torch import Tensor

from ..attention.attention_backend import TOKENWISE, AttentionPlan, KVCache
from ..attention.cache import pointers
from ..checkpoint.local_config import LIBRARIES
from ..checkpoint.mixer_config import StatePrompts
from ..checkpoint.model_config import SCALE_BYTES
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import HeadsArgs, load_fused, uses_triton
from ..kernels.threads import kernel_threads
from ..layers.activation import ACTIVATIONS
from ..layers.panel_linear import PanelLinear
from .ops import HeadNorm, Ops, Rotation
from .state_ops import CPUStateOps, StateOps
from .torch_ops import TorchOps

_GATES = {
    "silu": "silu_mul",
    "swish": "silu_mul",
    "gelu_pytorch_tanh": "gelu_mul",
    "gelu_new": "gelu_mul",
    "clamped_swiglu": "clamped_swiglu_mul",
}
"""The kernels of activations; PyTorch computes others."""


class CPUOps(TorchOps):
    """Fulfils :class:`~.ops.Ops` for float32 and bfloat16. Raises ``KernelsUnavailable`` without a compiler."""

    def __init__(self, march: str = "native") -> None:
        super().__init__()
        self._march = march
        self._kernels = load_fused(march)
        self._gates = {name: getattr(self._kernels, kernel) for name, kernel in _GATES.items()}

    @cached_property
    def states(self) -> StateOps:
        return CPUStateOps(self._march)

    def add_norm(
        self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float, shift: float = 0.0
    ) -> Tensor:
        assert residual.is_contiguous()
        assert delta is None or delta.is_contiguous()
        out = torch.empty_like(residual)
        self._kernels.add_norm(
            _is_bf16(residual),
            residual.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            *residual.shape,
            eps,
            shift,
            kernel_threads(),
        )
        return out

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation not in _GATES:
            return super().gate(gate_up, activation)
        assert gate_up.is_contiguous()
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, size)
        threads = kernel_threads()
        kernel = self._gates[activation]
        kernel(_is_bf16(gate_up), gate_up.data_ptr(), out.data_ptr(), rows, size, threads)
        return out

    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> Tensor:
        x, gate, (rows, size) = x.contiguous(), gate.contiguous(), x.shape
        out, pointers_to = torch.empty_like(x), (x.data_ptr(), gate.data_ptr())
        threads = kernel_threads()
        self._kernels.sigmoid_mul(_is_bf16(x), *pointers_to, out.data_ptr(), rows, size, gate.shape[1] == size, threads)
        return out

    def rotation(self, positions: Tensor, frequencies: Tensor, factor: float) -> Rotation:
        positions = positions.contiguous()
        count, half = len(positions), len(frequencies)
        cosines, sines = torch.empty(count, 1, half), torch.empty(count, 1, half)
        pointers_to = (each.data_ptr() for each in (positions, frequencies, cosines, sines))
        self._kernels.rotations(*pointers_to, count, half, factor, kernel_threads())
        return cosines, sines

    def rotate_and_write(
        self,
        heads: Tensor,
        norm: HeadNorm | None,
        rotation: Rotation,
        kv_cache: KVCache,
        plan: AttentionPlan,
    ) -> Tensor:
        # The kernel takes no strides: other rows would be read without an error.
        assert heads.is_contiguous()
        assert rotation[0].is_contiguous()
        assert rotation[1].is_contiguous()
        _, _, num_kv_heads, block_size, cache_head_size = kv_cache.shape
        is_int8 = kv_cache.dtype is torch.int8
        num_heads = heads.shape[1] - 2 * num_kv_heads
        keys, values = pointers(kv_cache)
        weights, eps, shift = norm if norm is not None else (None, 0.0, 0.0)
        args = HeadsArgs(
            heads=heads.data_ptr(),
            weights=None if weights is None else weights.data_ptr(),
            cos=rotation[0].data_ptr(),
            sin=rotation[1].data_ptr(),
            slots=plan.slots_of(kv_cache).data_ptr(),
            keys=keys,
            values=values,
            num_tokens=len(heads),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=heads.shape[2],
            rotated_size=2 * rotation[0].shape[2],
            cache_head_size=cache_head_size - SCALE_BYTES if is_int8 else cache_head_size,
            block_size=block_size,
            eps=eps,
            shift=shift,
            is_bf16=_is_bf16(heads),
            is_int8=is_int8,
            num_threads=kernel_threads(),
        )
        self._kernels.rotate_and_write(byref(args))
        return heads[:, :num_heads]


_PIECE = 1 << 14
"""Elements of a row that PyTorch computes in one call. It divides longer rows by the number of its threads."""


class TokenwiseOps(CPUOps):
    """Computes every row in an order that does not depend on the other rows, for batch-invariant engines."""

    # PyTorch computes whole vectors of elements with one algorithm and the rest of a tensor, or of a thread's part,
    # with another: the place of a row among all rows decided the last bits of its sigmoids.
    def rowwise(self, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def compute(x: Tensor) -> Tensor:
            if not x.numel():
                return function(x)
            pieces = [piece for row in x.reshape(len(x), -1) for piece in row.split(_PIECE)]
            return torch.cat([function(piece) for piece in pieces]).view(x.shape)

        return compute

    def per_head(self, matrices: Tensor) -> Callable[[Tensor], Tensor]:
        layers = [PanelLinear(matrix.t().contiguous()) for matrix in matrices]
        return lambda rows: torch.stack([layer(rows[:, head]) for head, layer in enumerate(layers)], dim=1)

    def gate(self, gate_up: Tensor, activation: str) -> Tensor:
        if activation in _GATES:
            return super().gate(gate_up, activation)
        gate, up = gate_up.chunk(2, dim=-1)
        return self.rowwise(ACTIVATIONS[activation])(gate) * up


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def make_ops(attention_backend: str, device: torch.device, prompts: StatePrompts = "scan") -> Ops:
    """C++ kernels with ``auto`` and ``cpu`` on a CPU where they can be had, Triton's with ``auto``, ``triton`` and the
    attention of a library on a GPU, else PyTorch's operations. With ``tokenwise`` C++ kernels; raises ``ValueError`` if
    they cannot be had. ``prompts``: how Triton's compute prompts of layers that keep a state; the others scan them."""
    if attention_backend == TOKENWISE:
        try:
            return TokenwiseOps()
        except KernelsUnavailable as error:
            raise ValueError(f"batch_invariant: needs the C++ kernels: {error}") from error
    if attention_backend in ("auto", "triton", *LIBRARIES) and uses_triton(device):
        from .triton_ops import TritonOps

        return TritonOps(prompts)
    if attention_backend in ("auto", "cpu") and device.type == "cpu":
        try:
            return CPUOps()
        except KernelsUnavailable as error:
            warn_unavailable(str(error))
    return TorchOps()

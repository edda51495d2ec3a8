"""Computes linear layers of float32 and bfloat16 with weights that are packed once, at load.

In panels of our own: float32 with FMA, bfloat16 on the matrix unit or with the instruction for pairs of such numbers
where the processor has them, otherwise in float32 arithmetic. A row's result depends on no other row. The panels lie in
huge pages, which oneDNN's packed matrices do not.

In the layout that oneDNN's kernels read: packing saves a reordering, or a slower kernel, at every multiplication, so a
step of one token reads its weights at the memory's speed. The operations are private to PyTorch, so :func:`can_pack`
tries them first.
"""

import contextlib
import functools
import platform
from collections.abc import Iterator, Sequence
from ctypes import CDLL

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.layer_state import LayerState, check_state, present, shapes_of
from ..checkpoint.weights import Linear
from ..kernels.compiler import KernelsUnavailable
from ..kernels.levels import processor_features
from ..kernels.library import load_bfloat16, load_bfloat16_dots, load_bfloat16_tiles, load_floats
from ..kernels.threads import kernel_threads
from .weight_memory import weight_memory


@functools.cache
def outruns_onednn(dtype: torch.dtype) -> bool:
    """Return whether the kernels are faster than oneDNN's, which read the weights of few rows at half of the memory's
    bandwidth. For bfloat16: with AVX-512 BF16, or the matrix unit."""
    return next(_fastest(dtype), None) is not None


def _fastest(dtype: torch.dtype) -> Iterator[CDLL]:
    """Yield the kernels of this processor that are faster than oneDNN's, best first."""
    # oneDNN packs into pages of 4 KiB and fetches nothing of what comes next: qwen3-0.6b's layers with AVX-512 BF16
    # read 31.5 instead of 14.8 GB/s for 8 rows, and make 403 instead of 333 GFLOP/s for 32; for 512 rows it is 403
    # against 423.
    for load in (load_floats,) if dtype == torch.float32 else (load_bfloat16_tiles, load_bfloat16_dots):
        with contextlib.suppress(KernelsUnavailable):
            yield load()


def _load_kernels(dtype: torch.dtype, inputs: int) -> CDLL:
    """Load the fastest kernels that this processor has. Raises :class:`KernelsUnavailable`."""
    for kernels in _fastest(dtype):
        if inputs % kernels.whole_inputs() == 0:
            return kernels
    return load_floats() if dtype == torch.float32 else load_bfloat16()


class PanelLinear:
    """Fulfils :class:`.Linear` on the CPU for inputs of its dtype; keeps a packed copy of ``weight`` [out, in],
    float32 or bfloat16, or of several weights of which the outputs follow each other.

    Raises :class:`KernelsUnavailable` without a compiler, or without FMA.
    """

    def __init__(self, weight: Tensor | Sequence[Tensor], bias: Tensor | None = None) -> None:
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        dtype, inputs = parts[0].dtype, parts[0].shape[1]
        if parts[0].device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            raise KernelsUnavailable(f"a matrix of {dtype} on {parts[0].device.type}")
        kernels = _load_kernels(dtype, inputs)
        self._multiply = kernels.multiply
        self._shape = (sum(map(len, parts)), inputs)
        self._weight = _in_panels(parts, kernels)
        self._bias = None if bias is None else bias.float()
        self._weight_at = self._weight.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        outputs, inputs = self._shape
        x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, outputs)
        self._multiply(
            x.data_ptr(),
            self._weight_at,
            self._bias_at,
            out.data_ptr(),
            rows,
            inputs,
            outputs,
            kernel_threads(),
        )
        return out if dtype is None else out.to(dtype)

    def state(self) -> LayerState:
        return LayerState([self.unpacked(), *present(self._bias)], [])  # panels differ between processors

    def with_state(self, state: LayerState) -> Linear:
        bias = present(self._bias)
        check_state(state, [(self._weight.dtype, self._shape), *shapes_of(bias)], 0)
        return PanelLinear(state.tensors[0], state.tensors[1] if bias else None)

    def take(self, other: Linear) -> Linear:
        if not isinstance(other, PanelLinear):
            return other
        self._weight.copy_(other._weight)
        self._bias, self._bias_at = other._bias, other._bias_at
        return self

    def unpacked(self) -> Tensor:
        """Return a copy of the weight [out, in]."""
        outputs, inputs = self._shape
        return self._weight.permute(0, 3, 2, 1, 4).reshape(-1, inputs)[:outputs]


def _in_panels(parts: list[Tensor], kernels: CDLL) -> Tensor:
    """Arrange [out, in] for the kernel as [panels, words of an output, words of inputs, outputs and inputs of a word].
    Outputs that share a word are of different parts of the panel."""
    panel, of_word = kernels.panel_outputs(), (kernels.word_outputs(), kernels.word_inputs())
    if any(len(part) % panel for part in parts[:-1]):
        parts = [torch.cat(parts)]
    outputs, inputs = sum(map(len, parts)), parts[0].shape[1]
    shape = -(-outputs // panel), inputs // of_word[1], panel // of_word[0], *of_word
    packed = weight_memory.empty(*shape, dtype=parts[0].dtype)
    place = packed.data_ptr()
    for part in parts:
        part = part.contiguous()
        kernels.pack(part.data_ptr(), place, len(part), inputs, kernel_threads())
        place += part.nbytes
    return packed


_ROWS = 32
"""oneDNN chooses the layout for this number of rows. It chooses the same one from one to hundreds of rows."""
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "avx_ne_convert"}
"""The features of x86-64 that oneDNN's bfloat16 products use."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class PackedLinear:
    """Fulfils :class:`.Linear` on the CPU; keeps a packed copy of ``weight`` [out, in], not the weight."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        with torch.inference_mode(False):
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        result: Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return result if dtype is None else result.to(dtype)

    def unpacked(self) -> Tensor:
        """Return a copy of the weight [out, in]."""
        weight: Tensor = self._weight.to_dense()
        return weight

    def state(self) -> LayerState:
        return LayerState([self.unpacked(), *present(self._bias)], [])

    def with_state(self, state: LayerState) -> Linear:
        check_state(state, shapes_of(self.state().tensors), 0)
        return PackedLinear(state.tensors[0], state.tensors[1] if self._bias is not None else None)

    def take(self, other: Linear) -> Linear:
        return other


@functools.cache
def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether packing works on this machine and multiplies correctly."""
    # Otherwise oneDNN would emulate bfloat16 products, which takes longer than float32 arithmetic.
    has_bfloat16 = platform.machine() != "x86_64" or processor_features() & _BFLOAT16
    if device.type != "cpu" or dtype not in _TOLERANCE or (dtype == torch.bfloat16 and not has_bfloat16):
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(*size, generator=generator).to(dtype) for size in ((48, 32), (48,), (3, 32)))
    try:
        found = [PackedLinear(weight, bias)(x[:rows]) for rows in (1, 3)]
    except (AttributeError, RuntimeError, TypeError):  # another version of PyTorch, or a CPU that oneDNN refuses
        return False
    tolerance = _TOLERANCE[dtype]
    expected = F.linear(x, weight, bias)
    return all(torch.allclose(y, expected[: len(y)], rtol=tolerance, atol=10 * tolerance) for y in found)

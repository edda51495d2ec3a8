"""Computes linear layers on a GPU: few rows with a Triton kernel that streams the weights, more rows with cuBLAS, 4-bit
integers as they are packed, and the experts of a layer with two grouped products, whatever the router chose."""

import copy
import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.files.quantized_weight import FloatWeight, QuantizedWeight
from ..checkpoint.layer_state import LayerState, check_state, present, shapes_of
from ..checkpoint.weights import Linear
from ..kernels.compiler import KernelsUnavailable
from ..kernels.triton import launch, power_of_2
from ..kernels.triton.products import (
    MOST_ROWS,
    few_rows,
    grouped_product,
    mix_places,
    packed_product,
    place_rows,
    rank_rows,
    route,
    unpack,
)
from ..kernels.triton.rows import round_rows
from .norm import RowNorm

KINDS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""The kernels' names of activations."""
_DTYPES = (torch.bfloat16, torch.float16)
_DEPTH = 128
"""Inputs that a program reads at a time, of each of its outputs."""
_STAGES = 5
_ROUND_WIDTH = 2048


class TritonLinear:
    """Fulfils :class:`.Linear` on a GPU."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    def takes(self, x: Tensor) -> bool:
        """Return whether the kernel computes these rows, of 16 bits: others, and all of a Hopper GPU, are cuBLAS's."""
        return are_few(x)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.takes(x):
            return multiply_few(x, self._weight, None, self._bias, dtype=dtype)
        if dtype == torch.float32 and x.dtype in _DTYPES:
            # As the kernel for few rows: with logits rounded to 16 bits, which of two is larger depended on the batch.
            product = torch.mm(x, self._weight.t(), out_dtype=torch.float32)
            return product if self._bias is None else product + self._bias
        result = F.linear(x, self._weight, self._bias)
        return result if dtype is None else result.to(dtype)

    def unpacked(self) -> Tensor:
        """Return the weight [out, in]."""
        return self._weight

    def state(self) -> LayerState:
        return LayerState([self._weight, *present(self._bias)], [])

    def with_state(self, state: LayerState) -> Linear:
        check_state(state, shapes_of(self.state().tensors), 0)
        weight, *bias = (each.to(self._weight.device) for each in state.tensors)
        return TritonLinear(weight, bias[0] if bias else None)

    def take(self, other: Linear) -> Linear:
        return other

    def gated(self, x: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up [n, out / 2] for rows that it :meth:`takes`; gates are the first outputs."""
        return multiply_few(x, self._weight, None, self._bias, KINDS[activation])

    @property
    def stored(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return weight, scales and bias, as :func:`multiply_few` takes them."""
        return self._weight, None, self._bias


class GroupedLinear:
    """Fulfils :class:`.Linear` on a GPU with 4-bit integers, which stay packed, or 8-bit floats, of which groups of
    inputs share a scale. Products of up to 256 rows read them as they are; for more rows they are written out in the
    rows' dtype, which takes a few percent of the time of the product by cuBLAS."""

    def __init__(self, weight: QuantizedWeight | FloatWeight, bias: Tensor | None, device: torch.device) -> None:
        """``weight``: integers from -8 to 7, or floats, on the host. Raises :class:`KernelsUnavailable` for groups or
        inputs that the kernels do not divide."""
        self._outputs, self._inputs = weight.values.shape
        self._group, self._half = weight.group, _half_of(self._inputs, weight.group)
        self._is_packed = isinstance(weight, QuantizedWeight)
        offsets = weight.offsets if isinstance(weight, QuantizedWeight) else None
        self._weight = (pack_halves(weight.values, self._half) if self._is_packed else weight.values).to(device)
        self._scales = weight.scales.t().contiguous().to(device)
        self._offsets = None if offsets is None else offsets.t().contiguous().to(device)
        self._bias = bias
        self._splits = _splits(self._outputs, self._inputs, self._half)
        num_tiles = -(-self._outputs // _GROUPED_COLUMNS) * (_MOST_GROUPED_ROWS // _GROUPED_ROWS)
        self._arrived = torch.zeros(num_tiles, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if len(x) > _MOST_GROUPED_ROWS:
            return TritonLinear(self._written_out(x.dtype), self._bias)(x, dtype)
        x, outputs = x.contiguous(), self._outputs
        rows = 16 if len(x) <= 16 else _GROUPED_ROWS
        out = torch.empty(len(x), outputs, dtype=dtype or x.dtype, device=x.device)
        partial = out
        if self._splits > 1:
            partial = torch.empty(self._splits, len(x), outputs, dtype=torch.float32, device=x.device)
        launch(
            packed_product,
            (-(-outputs // _GROUPED_COLUMNS), self._splits, -(-len(x) // rows)),
            x,
            self._weight,
            self._scales,
            self._scales if self._offsets is None else self._offsets,
            x if self._bias is None else self._bias,
            out,
            partial,
            self._arrived,
            len(x),
            self._inputs,
            outputs,
            self._group,
            IS_PACKED=self._is_packed,
            HAS_OFFSETS=self._offsets is not None,
            HAS_BIAS=self._bias is not None,
            EVEN=outputs % _GROUPED_COLUMNS == 0,
            SPLITS=self._splits,
            HALF=self._half,
            ROWS=rows,
            COLUMNS=_GROUPED_COLUMNS,
            num_warps=4 if rows == 16 else 8,
            num_stages=4 if rows == 16 else 3,
        )
        return out

    def _written_out(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [out, in] in ``dtype``."""
        out = torch.empty(self._outputs, self._inputs, dtype=dtype, device=self._weight.device)
        launch(
            unpack,
            (-(-self._outputs // _UNPACKED), self._inputs // (2 * self._half)),
            self._weight,
            self._scales,
            self._scales if self._offsets is None else self._offsets,
            out,
            self._inputs,
            self._outputs,
            self._group,
            IS_PACKED=self._is_packed,
            HAS_OFFSETS=self._offsets is not None,
            HALF=self._half,
            COLUMNS=_UNPACKED,
            num_warps=4,
        )
        return out

    def state(self) -> LayerState:
        tensors = [self._weight.view(torch.uint8), self._scales, *present(self._offsets, self._bias)]
        return LayerState(tensors, [self._group, self._offsets is not None])

    def with_state(self, state: LayerState) -> Linear:
        check_state(state, shapes_of(self.state().tensors), 2)
        if state.numbers != self.state().numbers:
            raise ValueError(f"a weight in groups of {state.numbers[0]} for a layer in groups of {self._group}")
        other, tensors = copy.copy(self), [each.to(self._weight.device) for each in state.tensors]
        other._weight, other._scales = tensors[0].view(self._weight.dtype), tensors[1]
        other._offsets = None if self._offsets is None else tensors[2]
        other._bias = None if self._bias is None else tensors[-1]
        return other

    def take(self, other: Linear) -> Linear:
        return other


_GROUPED_COLUMNS = 64
_GROUPED_ROWS = 64
_MOST_GROUPED_ROWS = 256
"""Above, the product waits for the tensor cores and not for the weights, of which it reads four times as many bytes."""
_UNPACKED = 32
_GROUPED_PROGRAMS = 264
"""Two for each multiprocessor of an H100."""


def _half_of(inputs: int, group: int) -> int:
    """Return how many inputs, which share a scale, a program multiplies at a time; there are two halves."""
    for half in (128, 64, 32, 16):
        if (group % half == 0 or group == inputs) and inputs % (2 * half) == 0:
            return half
    raise KernelsUnavailable(f"a weight of {inputs} inputs in groups of {group}")


def _splits(outputs: int, inputs: int, half: int) -> int:
    """Return into how many parts the inputs are divided, so that all multiprocessors read weights of few rows."""
    tiles, blocks = -(-outputs // _GROUPED_COLUMNS), inputs // (2 * half)
    return max(1, min(8, blocks // 2, _GROUPED_PROGRAMS // tiles))


def pack_halves(values: Tensor, half: int) -> Tensor:
    """Return [out, in] int8 from -8 to 7 as [out, in / 2] uint8, as ``kernels.triton.products.packed_product`` reads
    them."""
    outputs, inputs = values.shape
    codes = (values + 8).view(torch.uint8).view(outputs, inputs // (2 * half), 2, half)
    return (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(outputs, inputs // 2)


def are_few(x: Tensor) -> bool:
    """Return whether :func:`multiply_few` computes these rows."""
    return len(x) <= _most_rows(x.device) and x.dtype in _DTYPES


@functools.cache
def _most_rows(device: torch.device) -> int:
    """Return how many rows the kernel for few rows computes on a device at most."""
    # On an H200 cuBLAS was faster for each shape, and a decode step of an 8B took 6 ms instead of 12
    # (tests/gpu_check/h200.md). Other GPUs have not been measured.
    is_on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return 0 if is_on_gpu and torch.cuda.get_device_capability(device) == (9, 0) else MOST_ROWS


def multiply_few(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    bias: Tensor | None,
    kind: str = "none",
    dtype: torch.dtype | None = None,
    norm: RowNorm | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias [n, out] of ``dtype``, by default that of x, or with a ``kind`` of activation
    activation(gate) * up [n, out / 2].

    Args:
        scales: [out]: factors on a weight of 8-bit floats.
        norm: What is applied to x before; None: nothing.
        into: [n, outputs]: what is returned is added to it, in place; None: to nothing.
    """
    x = x.contiguous()
    inputs, outputs = x.shape[1], len(weight) if kind == "none" else len(weight) // 2
    # With gates a program reads two rows of weights for each output.
    columns = 16 if kind != "none" else 32 if outputs < 1 << 15 else 64
    out = into
    if out is None:
        out = torch.empty(len(x), outputs, dtype=dtype or x.dtype, device=x.device)
    weights, eps, shift = (x, 0.0, 0.0) if norm is None else norm
    launch(
        few_rows,
        (-(-outputs // columns),),
        x,
        weight,
        x if scales is None else scales,
        x if bias is None else bias,
        weights,
        out,
        len(x),
        inputs,
        outputs,
        eps,
        shift,
        HAS_SCALES=scales is not None,
        HAS_BIAS=bias is not None,
        HAS_NORM=norm is not None,
        ADDS=into is not None,
        KIND=kind,
        EVEN=inputs % _DEPTH == 0 and outputs % columns == 0,
        COLUMNS=columns,
        DEPTH=_DEPTH,
        num_warps=4,
        num_stages=_STAGES,
    )
    return out


def round_rows_at_once(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what ``fp8_linear.round_rows`` does for x [n, m], from one kernel."""
    x = x.contiguous()
    numbers = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    launch(round_rows, (len(x),), x, numbers, scales, x.shape[1], WIDTH=_ROUND_WIDTH, num_warps=8)
    return numbers, scales


_COLUMNS = 64
_EXPERT_DEPTH = 64
_MIX_WIDTH = 1024
_RANK_WIDTH = 256
_PLACED = 8192
"""Pairs of a row and an expert that a program compares."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Holds which places each tile of rows has, on the device; see ``kernels.triton.grouped_product``."""

    places: Tensor
    """[tiles * rows] int32."""
    experts: Tensor
    """[tiles] int32."""
    rows: int
    """Of a tile."""

    @classmethod
    def sort(cls, chosen: Tensor, num_experts: int, counts: Tensor, num_real: Tensor) -> "ExpertTiles":
        """Sort the choices [T, k] into tiles, without waiting for them on the host.

        There are as many tiles as the choices may need at most: one for each full ``rows`` of them, and for each expert
        one that is not full. ``counts`` and ``num_real``: as :meth:`.expert_routes.LayerRoutes.places` returns them.
        """
        num_places, device = chosen.numel(), chosen.device
        rows = 16 if num_places <= 16 * num_experts else 64
        num_tiles = min(num_places, num_places // rows + num_experts)
        chosen = chosen.contiguous()
        sizes = torch.zeros(num_experts, dtype=torch.int32, device=device)
        ranks = torch.empty(num_places, dtype=torch.int32, device=device)
        grid = (-(-num_places // _RANK_WIDTH),)
        sizing = (chosen, num_real, sizes, ranks, counts, num_places, chosen.shape[1], num_experts)
        launch(rank_rows, grid, *sizing, WIDTH=_RANK_WIDTH, num_warps=4)
        places = torch.empty(num_tiles * rows, dtype=torch.int32, device=device)
        experts = torch.empty(num_tiles, dtype=torch.int32, device=device)
        padded = power_of_2(num_experts, 16)
        width = max(16, _PLACED // padded)
        placing = (chosen, ranks, sizes, places, experts, num_places, num_tiles, num_experts)
        grid = (max(num_experts, -(-num_places // width)),)
        launch(place_rows, grid, *placing, ROWS=rows, EXPERTS=padded, WIDTH=width, num_warps=4)
        return cls(places, experts, rows)


class TritonExperts:
    """Holds the matrices of all experts of a layer."""

    def __init__(
        self,
        gate_up: Tensor,
        down: Tensor,
        activation: str,
        gate_up_scales: Tensor | None = None,
        down_scales: Tensor | None = None,
    ) -> None:
        """``gate_up`` [experts, 2 * size, hidden_size], ``down`` [experts, hidden_size, size], of 8-bit floats if
        there are scales.

        ``gate_up_scales`` [experts, 2 * size] and ``down_scales`` [experts, hidden_size]: factors on them, or None.
        """
        self._gate_up = gate_up
        self._down = down
        self._gate_up_scales = gate_up_scales
        self._down_scales = down_scales
        self._kind = KINDS[activation]

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor, counts: Tensor, num_real: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of what the experts ``chosen`` [T, k] compute of x, times ``weights``.
        ``counts``, ``num_real``: as in :meth:`ExpertTiles.sort`; rows of padding are arbitrary."""
        num_tokens, per_token = chosen.shape
        tiles = ExpertTiles.sort(chosen, len(self._down), counts, num_real)
        num_places = num_tokens * per_token
        up = (self._gate_up, self._gate_up_scales, self._kind)
        active = _grouped(x.contiguous(), *up, tiles, num_places, share=per_token)
        results = _grouped(active, self._down, self._down_scales, "none", tiles, num_places, share=1)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        size = x.shape[1]
        grid = (num_tokens, -(-size // _MIX_WIDTH))
        weights = weights.float().contiguous()
        launch(mix_places, grid, results, weights, out, per_token, size, WIDTH=_MIX_WIDTH, num_warps=4)
        return out


class SlotMatrices(NamedTuple):
    """Holds what is added to the outputs of rows, by the slot of each row's adapter."""

    down: Tensor
    """[slots, ranks, inputs]"""
    up: Tensor
    """[slots, outputs, ranks]"""
    factors: Tensor
    """[slots, outputs] float32: outputs are multiplied by them then."""
    shifts: Tensor
    """[slots, outputs] float32: what is added at last."""


def change_rows(x: Tensor, out: Tensor, changes: SlotMatrices, tiles: ExpertTiles) -> None:
    """Change the outputs [T, outputs] of a layer in place, for the rows x [T, inputs] that ``tiles`` hold, by slots."""
    assert out.is_contiguous()
    inner = _grouped(x.contiguous(), changes.down, None, "none", tiles, len(x), share=1)
    _grouped(inner, changes.up, None, "none", tiles, len(x), share=1, into=(out, changes.factors, changes.shifts))


def _grouped(
    x: Tensor,
    matrices: Tensor,
    scales: Tensor | None,
    kind: str,
    tiles: ExpertTiles,
    num_places: int,
    *,
    share: int,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the products [num_places, outputs] of places with their experts' matrices, or what a ``kind`` of
    activation makes of gates and ups. ``share``: places that read one row of x. ``into``: a tensor that they are added
    to in place, and the factors and shifts that follow; None: there is none."""
    _, outputs, inputs = matrices.shape
    outputs = outputs if kind == "none" else outputs // 2
    out, factors, shifts = (x.new_empty(num_places, outputs), x, x) if into is None else into
    launch(
        grouped_product,
        (len(tiles.experts), -(-outputs // _COLUMNS)),
        x,
        matrices,
        x if scales is None else scales,
        factors,
        shifts,
        out,
        tiles.places,
        tiles.experts,
        num_places,
        inputs,
        outputs,
        SHARE=share,
        HAS_SCALES=scales is not None,
        ADDS=into is not None,
        KIND=kind,
        EVEN=inputs % _EXPERT_DEPTH == 0 and outputs % _COLUMNS == 0,
        ROWS=tiles.rows,
        COLUMNS=_COLUMNS,
        DEPTH=_EXPERT_DEPTH,
        num_warps=4,
        num_stages=4 if kind == "none" else 3,
    )
    return out


def choose_experts(logits: Tensor, per_token: int, *, normalizes: bool) -> tuple[Tensor, Tensor]:
    """Return the weights, float32, and the numbers of each token's experts, both [T, per_token], from a router's logits
    [T, experts] float32: the largest shares of a softmax, divided by their sum if ``normalizes``."""
    num_tokens, num_experts = logits.shape
    weights = torch.empty(num_tokens, per_token, device=logits.device)
    chosen = torch.empty(num_tokens, per_token, dtype=torch.int64, device=logits.device)
    sizes = {"EXPERTS": power_of_2(num_experts, 16), "CHOICES": power_of_2(per_token)}
    arguments = (logits.contiguous(), weights, chosen, num_experts, per_token)
    launch(route, (num_tokens,), *arguments, NORMALIZES=normalizes, **sizes, num_warps=1)
    return weights, chosen

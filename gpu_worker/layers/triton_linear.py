"""Computes linear layers on a GPU: few rows with a Triton kernel that streams the weights, more rows with cuBLAS, and
the experts of a layer with two grouped products, whatever the router chose."""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.layer_state import LayerState, check_state, present, shapes_of
from ..checkpoint.weights import Linear
from ..kernels.triton.launch import launch, power_of_2
from ..kernels.triton.products import (
    MOST_ROWS,
    few_rows,
    grouped_product,
    mix_places,
    place_rows,
    rank_rows,
    route,
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

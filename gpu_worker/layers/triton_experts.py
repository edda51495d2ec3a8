"""Computes the experts of a layer on a GPU: two grouped products and one gate, whatever the router chose."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.triton.activations import gate
from ..kernels.triton.grouped_product import grouped_product
from ..kernels.triton.launch import launch
from .triton_linear import KINDS

_COLUMNS = 64
_DEPTH = 64
_GATE_WIDTH = 512


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
    def sort(cls, chosen: Tensor, num_experts: int) -> "ExpertTiles":
        """Sort the choices [T, k] into tiles, without waiting for them on the host.

        There are as many tiles as any choice may need: one for each ``rows`` places, and a partial one an expert.
        """
        flat = chosen.flatten()
        num_places, device = len(flat), chosen.device
        rows = 16 if num_places <= 16 * num_experts else 64
        num_tiles = min(num_places, num_places // rows + num_experts)
        by_expert, order = flat.sort(stable=True)
        numbers = torch.arange(num_experts + 1, device=device)
        starts = torch.searchsorted(by_expert, numbers)  # [experts + 1]: where each expert's places begin
        tiles_before = torch.cumsum((starts.diff() + rows - 1) // rows, 0)  # [experts]: tiles up to and with each
        tiles = torch.arange(num_tiles, device=device)
        expert = torch.searchsorted(tiles_before, tiles, right=True)
        known = expert.clamp(max=num_experts - 1)
        first_tile = torch.where(known > 0, tiles_before[(known - 1).clamp(min=0)], 0)
        index = starts[known] + (tiles - first_tile) * rows
        at = index[:, None] + torch.arange(rows, device=device)
        is_place = (at < starts[known + 1][:, None]) & (expert < num_experts)[:, None]
        places = torch.where(is_place, order[at.clamp(max=num_places - 1)], num_places)
        experts = torch.where(expert < num_experts, expert, -1)
        return cls(places.flatten().to(torch.int32), experts.to(torch.int32), rows)


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

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return [T, hidden_size]: the sum of what the experts ``chosen`` [T, k] compute of x, times ``weights``."""
        num_tokens, per_token = chosen.shape
        tiles = ExpertTiles.sort(chosen, len(self._down))
        num_places = num_tokens * per_token
        inner = self._product(x.contiguous(), self._gate_up, self._gate_up_scales, tiles, num_places, share=per_token)
        size = inner.shape[1] // 2
        active = inner.new_empty(num_places, size)
        grid = (num_places, -(-size // _GATE_WIDTH))
        launch(gate, grid, inner, active, size, KIND=self._kind, WIDTH=_GATE_WIDTH, num_warps=4)
        results = self._product(active, self._down, self._down_scales, tiles, num_places, share=1)
        return (results.view(num_tokens, per_token, -1) * weights[..., None]).sum(1).to(x.dtype)

    def _product(
        self, x: Tensor, matrices: Tensor, scales: Tensor | None, tiles: ExpertTiles, num_places: int, share: int
    ) -> Tensor:
        _, outputs, inputs = matrices.shape
        out = x.new_empty(num_places, outputs)
        launch(
            grouped_product,
            (len(tiles.experts), -(-outputs // _COLUMNS)),
            x,
            matrices,
            x if scales is None else scales,
            out,
            tiles.places,
            tiles.experts,
            num_places,
            inputs,
            outputs,
            SHARE=share,
            HAS_SCALES=scales is not None,
            EVEN=inputs % _DEPTH == 0 and outputs % _COLUMNS == 0,
            ROWS=tiles.rows,
            COLUMNS=_COLUMNS,
            DEPTH=_DEPTH,
            num_warps=4,
            num_stages=4,
        )
        return out

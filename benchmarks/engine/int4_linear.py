"""Measures what 4-bit weights would gain: PyTorch's packed int4 product next to our bfloat16 and int8 layers.

``python -m tokenloom.bench.engine.int4_linear`` runs the linear layers of qwen3-0.6b's blocks, more than a cache holds,
in turns.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenloom.gpu_worker.layers.int8_linear import Int8Linear
from tokenloom.gpu_worker.layers.packed_linear import PackedLinear, can_pack

SHAPES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
"""[inputs, outputs]: queries, keys and values; attention's output; gate and up; down."""
_LEVELS = 16
Layer = Callable[[Tensor], Tensor]


class Int4Linear:
    """Rounds weights [out, in] to 16 levels between the least and the largest of each ``group`` inputs."""

    def __init__(self, weight: Tensor, group: int) -> None:
        outputs, inputs = weight.shape
        grouped = weight.float().view(outputs, inputs // group, group)
        least, largest = grouped.amin(dim=2), grouped.amax(dim=2)
        scales = (largest - least).clamp(min=1e-6) / (_LEVELS - 1)
        levels = ((grouped - least[..., None]) / scales[..., None]).round().clamp(0, _LEVELS - 1)
        self._weight = torch.ops.aten._convert_weight_to_int4pack_for_cpu(levels.view(outputs, inputs).int(), 1)
        # The size of a level, and the value of the middle level.
        middle = least + scales * (_LEVELS // 2)
        self._scales = torch.stack((scales.t(), middle.t()), dim=2).to(torch.bfloat16).contiguous()
        self._group = group

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._weight, self._group, self._scales)
        return y


def make_layers(blocks: int, groups: Sequence[int]) -> dict[str, list[Layer]]:
    """Make the layers of so many blocks with random weights, by kind."""
    layers: dict[str, list[Layer]] = {kind: [] for kind in ("bfloat16", "int8", *map(_kind, groups))}
    packs = can_pack(torch.device("cpu"), torch.bfloat16)
    for _ in range(blocks):
        for inputs, outputs in SHAPES:
            weight = (torch.randn(outputs, inputs) * 0.02).to(torch.bfloat16)
            layers["bfloat16"].append(PackedLinear(weight) if packs else partial(F.linear, weight=weight))
            layers["int8"].append(Int8Linear(weight))
            for group in groups:
                layers[_kind(group)].append(Int4Linear(weight, group))
    return layers


def _kind(group: int) -> str:
    return f"int4, {group}"


def run(layers: dict[str, list[Layer]], rows: int, rounds: int) -> dict[str, float]:
    """Return the least µs of one block, by kind; the kinds take turns."""
    inputs = [torch.randn(rows, inputs).to(torch.bfloat16) for inputs, _ in SHAPES]
    least = dict.fromkeys(layers, float("inf"))
    for _ in range(rounds):
        for kind, each in layers.items():
            started = time.perf_counter()
            for index, layer in enumerate(each):
                layer(inputs[index % len(inputs)])
            seconds = time.perf_counter() - started
            least[kind] = min(least[kind], seconds / len(each) * len(SHAPES) * 1e6)
    return least


def main() -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    torch.manual_seed(0)
    with torch.inference_mode():
        layers = make_layers(options.blocks, options.groups)
        for rows in options.rows:
            least = run(layers, rows, options.rounds)
            print(f"{rows} rows, µs a block: " + "; ".join(f"{kind}: {us:,.0f}" for kind, us in least.items()))


if __name__ == "__main__":
    main()

"""Measures linear layers of 4 and 8 bits next to those in the model's dtype, by number of rows.

``python -m tokenloom.bench.engine.quantization.quantized_linear`` runs the linear layers of qwen3-0.6b's blocks, more
than a cache holds, in turns: each dtype, bfloat16 by oneDNN, int8 by output (``--quantization int8-dynamic``), groups
of 32 in 8 and 4 bits (``--quantization int4``), and 8-bit floats in blocks of 128 by 128, as files have them. With
``OMP_NUM_THREADS=1`` it measures CPU time, which other processes hardly change.
"""

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenloom.gpu_worker.checkpoint.files.quantized_weight import FloatWeight, round_to_4_bits, round_to_8_bits
from tokenloom.gpu_worker.kernels.levels import LEVELS, limit_level
from tokenloom.gpu_worker.layers.fp8_linear import WidenedLinear
from tokenloom.gpu_worker.layers.linear import make_linear, make_quantized
from tokenloom.gpu_worker.layers.panel_linear import PackedLinear
from tokenloom.gpu_worker.layers.quantized_linear import Int8Linear

from ..bandwidth import read_bandwidth

SHAPES = ((1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024))
"""[inputs, outputs]: queries, keys and values; attention's output; gate and up; down."""
Layer = Callable[[Tensor], Tensor]
_KINDS: dict[str, tuple[Callable[[Tensor], Layer], float]] = {
    "bfloat16": (lambda weight: make_linear(weight.bfloat16()), 2.0),
    "oneDNN": (lambda weight: PackedLinear(weight.bfloat16()), 2.0),
    "float32": (make_linear, 4.0),
    "int8": (Int8Linear, 1.0),
    "8 bits": (lambda weight: make_quantized(round_to_8_bits(weight), None, torch.bfloat16), 8.5 / 8),
    "fp8": (lambda weight: WidenedLinear([_in_blocks(weight)]), 1 + 4 / 128),
    "4 bits": (lambda weight: make_quantized(round_to_4_bits(weight), None, torch.bfloat16), 4.5 / 8),
}
"""Maps a kind to what makes its layer, and the bytes of a weight."""
KINDS = tuple(_KINDS)


def _in_blocks(weight: Tensor) -> FloatWeight:
    """Round a weight [out, in] of whole blocks of 128 by 128 to 8-bit floats, with a scale for each block."""
    outputs, inputs = weight.shape
    blocks = weight.view(outputs // 128, 128, inputs // 128, 128)
    scales = blocks.abs().amax((1, 3)) / 448
    values = (blocks / scales[:, None, :, None]).view(outputs, inputs).to(torch.float8_e4m3fn)
    return FloatWeight(values, scales.repeat_interleave(128, 0), 128)


def make_layers(blocks: int, kinds: Sequence[str] = KINDS) -> dict[str, list[Layer]]:
    """Make the layers of so many blocks with random weights, by kind."""
    layers: dict[str, list[Layer]] = {kind: [] for kind in kinds}
    for _ in range(blocks):
        for inputs, outputs in SHAPES:
            weight = torch.randn(outputs, inputs) * 0.02
            for kind in kinds:
                layers[kind].append(_KINDS[kind][0](weight))
    return layers


def run(layers: dict[str, list[Layer]], rows: int, rounds: int) -> dict[str, float]:
    """Return the least µs of one block, by kind; the kinds take turns."""
    inputs = [torch.randn(rows, inputs) for inputs, _ in SHAPES]
    halves = [each.bfloat16() for each in inputs]
    least = dict.fromkeys(layers, float("inf"))
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(rounds):
        for kind, each in layers.items():
            of_kind = inputs if kind == "float32" else halves
            started = clock()
            for index, layer in enumerate(each):
                layer(of_kind[index % len(SHAPES)])
            seconds = clock() - started
            least[kind] = min(least[kind], seconds / len(each) * len(SHAPES) * 1e6)
    return least


def describe(kind: str, us: float, bandwidth: float) -> str:
    """Return a block's time, and which share of ``bandwidth`` in bytes a second the reading of its weights takes."""
    size = sum(inputs * outputs for inputs, outputs in SHAPES) * _KINDS[kind][1]
    return f"{kind}: {us:,.0f} ({size / us * 1e6 / bandwidth:.0%})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--level", choices=[level.name for level in LEVELS], help="compute as such a processor")
    options = parser.parse_args(arguments)
    if options.level:
        limit_level(options.level)
    torch.manual_seed(0)
    with torch.inference_mode():
        layers = make_layers(options.blocks, options.kinds)
        bandwidth = read_bandwidth(torch.get_num_threads())
        print(f"µs a block, and the share of the {bandwidth / 1e9:.1f} GB/s that this machine reads")
        for rows in options.rows:
            least = run(layers, rows, options.rounds)
            print(f"{rows} rows: " + "; ".join(describe(kind, us, bandwidth) for kind, us in least.items()), flush=True)


if __name__ == "__main__":
    main()

"""Blocks of GGUF's types: equal to what the format's own package unpacks, and kept as they are by the kernels."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import HALVES
from tokenloom.gpu_worker.checkpoint.gguf.blocks import BLOCK_TYPES, MXFP4, floats4
from tokenloom.gpu_worker.checkpoint.gguf.source import PackedBlocks, PackedFloatBlocks
from tokenloom.gpu_worker.layers.linear import make_packed
from tokenloom.gpu_worker.layers.quantized_linear import QuantizedLinear

ALL_HALVES = {
    **HALVES, Kind.Q4_0: (0,), Kind.Q4_1: (0, 2), Kind.Q5_0: (0,), Kind.Q5_1: (0, 2), Kind.Q8_0: (0,),
    Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.MXFP4: (),
}  # fmt: skip
"""Where the blocks of each type have a float16."""


def any_blocks(kind: Kind, count: int) -> np.ndarray:
    """Return blocks of random bytes, with numbers where the type has some."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    for at in ALL_HALVES[kind]:
        blocks[:, at : at + 2] = random.normal(size=count).astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind is Kind.MXFP4:
        blocks[:, 0] = random.integers(110, 130, count)
    return blocks


def test_every_type_is_tried() -> None:
    assert {Kind(number) for number in BLOCK_TYPES} == ALL_HALVES.keys()
    for number, block in BLOCK_TYPES.items():
        assert (block.name, (block.size, block.bytes)) == (Kind(number).name, gguf.GGML_QUANT_SIZES[Kind(number)])


@pytest.mark.parametrize("kind", ALL_HALVES, ids=lambda kind: kind.name)
def test_numbers_are_those_of_the_package(kind: Kind) -> None:
    blocks = any_blocks(kind, 512)
    expected = gguf.quants.dequantize(blocks, kind)
    weight = PackedBlocks(torch.from_numpy(blocks), BLOCK_TYPES[kind.value], None)
    assert weight.shape == expected.shape
    found = weight.rows(0, 512).numpy()
    assert (weight.quantized().offsets is not None) == weight.has_offsets
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(expected).max()
    assert weight.has_offsets or np.array_equal(found, expected)


def test_floats_of_every_exponent() -> None:
    blocks = any_blocks(Kind.MXFP4, 252)
    blocks[:, 0] = range(1, 253)
    found = floats4(torch.from_numpy(blocks), 252).dequantize().numpy()
    assert np.array_equal(found, gguf.quants.dequantize(blocks, Kind.MXFP4))


@pytest.mark.parametrize(("kind", "bits"), [(Kind.IQ4_NL, 8), (Kind.IQ4_XS, 8), (Kind.MXFP4, 4)], ids=str)
def test_kernels_keep_the_numbers_in_few_bits(kind: Kind, bits: int) -> None:
    size = gguf.GGML_QUANT_SIZES[kind][0]
    stored = torch.from_numpy(any_blocks(kind, 64 * 512 // size)).view(64, -1)
    made = PackedFloatBlocks if BLOCK_TYPES[kind.value] is MXFP4 else PackedBlocks
    weight = made(stored, BLOCK_TYPES[kind.value], None)
    layer = make_packed([weight], None, torch.device("cpu"))
    assert isinstance(layer, QuantizedLinear)
    assert layer.bits == bits
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(0))
    expected = x @ weight.rows(0, 64).T
    assert (layer(x) - expected).norm() <= 0.02 * expected.norm()


def test_floats_beside_integers_are_one_layer() -> None:
    floats = PackedFloatBlocks(torch.from_numpy(any_blocks(Kind.MXFP4, 64)).view(32, -1), MXFP4, None)
    integers = PackedBlocks(torch.from_numpy(any_blocks(Kind.Q8_0, 64)).view(32, -1), BLOCK_TYPES[8], None)
    layer = make_packed([floats, integers], None, torch.device("cpu"))
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    expected = x @ torch.cat((floats.rows(0, 32), integers.rows(0, 32))).T
    assert layer is not None
    assert (layer(x) - expected).norm() <= 0.02 * expected.norm()

"""Quantized weights state what they hold, and rounding leaves little error."""

import pytest
import torch

from tokenloom.gpu_worker.checkpoint.files import quantized_weight
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import (
    ROW_STEP,
    PackedWeight,
    QuantizedWeight,
    fill_rows,
    round_to_4_bits,
)
from tokenloom.gpu_worker.parallel.sharding import Dimension, ShardedDimension


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def test_dequantizing_applies_the_scale_and_offset_of_each_group():
    values = torch.tensor([[1, -2, 3, 4], [0, 5, -6, 7]], dtype=torch.int8)
    scales, offsets = torch.tensor([[2.0, 0.5], [-1.0, 10.0]]), torch.tensor([[1.0, 0.0], [0.0, 3.0]])
    weight = QuantizedWeight(values, scales, offsets, 2)
    assert weight.shape == (2, 4)
    assert weight.dequantize().tolist() == [[3, -3, 1.5, 2], [0, -5, -57, 73]]
    symmetric = QuantizedWeight(values, scales, None, 2).dequantize(torch.bfloat16)
    assert symmetric.tolist() == [[2, -4, 1.5, 2], [0, -5, -60, 70]]
    assert symmetric.dtype == torch.bfloat16


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_leaves_less_error_than_the_range_divided_evenly(group, dtype):
    weight = random(48, 256).to(dtype)
    rounded = round_to_4_bits(weight, group)
    assert rounded.scales.shape == (48, 256 // group)
    assert rounded.offsets is None
    assert -8 <= int(rounded.values.min()) < 0 < int(rounded.values.max()) <= 7
    exact = weight.float()
    extremes = exact.view(48, -1, group).abs().amax(2, keepdim=True) / 7
    evenly = ((exact.view(48, -1, group) / extremes).round() * extremes).view(48, 256)
    assert relative_error(rounded.dequantize(), exact) < 0.9 * relative_error(evenly, exact)


def test_scales_fit_into_float16():
    scales = round_to_4_bits(random(64, 128)).scales
    assert torch.equal(scales, scales.half().float())


def test_rows_are_rounded_independently_of_how_many_are_rounded_at_once(monkeypatch):
    weight = random(40, 64)
    whole = round_to_4_bits(weight)
    monkeypatch.setattr("tokenloom.gpu_worker.checkpoint.files.quantized_weight._AT_ONCE", 200)
    parts = round_to_4_bits(weight)
    assert torch.equal(whole.values, parts.values)
    assert torch.equal(whole.scales, parts.scales)


def test_zeros_and_tiny_numbers_keep_their_size():
    weight = torch.zeros(3, 64)
    weight[1] = random(64) * 1e-9
    weight[2, :32] = random(32)
    found = round_to_4_bits(weight).dequantize()
    assert not found[0].any()
    assert relative_error(found[1], weight[1]) < 0.12
    assert not found[2, 32:].any()


@pytest.mark.parametrize(
    ("values", "scales", "message"),
    [
        (torch.zeros(2, 64), torch.zeros(2, 2), "values must be int8"),
        (torch.zeros(2, 48, dtype=torch.int8), torch.zeros(2, 2), "whole groups of 32"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 1), r"scales must be float32 \[2, 2\]"),
        (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 2).half(), "scales must be float32"),
    ],
)
def test_parts_that_do_not_fit_are_refused(values, scales, message):
    with pytest.raises(ValueError, match=message):
        QuantizedWeight(values, scales, None, 32)


def test_inputs_that_are_no_whole_groups_are_refused():
    with pytest.raises(ValueError, match="48 inputs cannot be rounded in groups of 32"):
        round_to_4_bits(random(4, 48))


class Rows(PackedWeight):
    """Holds numbers that need no unpacking, and counts those that were asked for."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole, self.asked = whole, 0

    @property
    def shape(self) -> tuple[int, int]:
        return self.whole.shape[0], self.whole.shape[1]

    def rows(self, first: int, last: int) -> torch.Tensor:
        assert first % ROW_STEP == 0
        self.asked += last - first
        return self.whole[first:last]


@pytest.mark.parametrize(
    ("outputs", "most"),
    [
        (None, 300),
        (300, 300),
        (ShardedDimension(300, ((0, 150),)), 192),
        (ShardedDimension(300, ((150, 300),)), 172),
        (ShardedDimension(300, ((63, 65), (65, 70), (200, 300))), 128 + 64 + 108),
    ],
)
def test_only_the_rows_of_a_part_are_unpacked(
    outputs: Dimension | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_weight, "AT_ONCE", 64 * 8)  # 64 rows at a time
    packed = Rows(torch.arange(300.0 * 8).view(300, 8))
    found = fill_rows(packed, torch.float32, torch.device("cpu"), outputs)
    wanted = quantized_weight.take_part(packed.whole, (300 if outputs is None else outputs, 8))
    assert torch.equal(found, wanted)
    assert found.untyped_storage().nbytes() == found.nbytes
    assert packed.asked <= most

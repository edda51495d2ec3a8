"""Quantized weights state what they hold, and rounding leaves little error."""

import pytest
import torch

from tokenloom.gpu_worker.checkpoint.files.quantized_weight import QuantizedWeight, round_to_4_bits


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

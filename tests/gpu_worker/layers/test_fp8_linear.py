"""Layers of 8-bit floats: what rounding costs, and that rows are rounded each by itself."""

import pytest
import torch

from tokenloom.gpu_worker.checkpoint.model_config import FP8
from tokenloom.gpu_worker.layers.fp8_linear import Fp8Linear, round_rows, round_weight
from tokenloom.gpu_worker.layers.linear import make_linear


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 32, 64), (17, 48, 256), (300, 16, 1024)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_within_the_error_of_two_roundings_of_float32_s(rows, outputs, inputs, has_bias):
    x, weight, bias = random(rows, inputs), random(outputs, inputs), random(outputs) if has_bias else None
    layer = make_linear(weight, bias, FP8)
    assert isinstance(layer, Fp8Linear)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # Each factor is off by at most 1 / 16 and by 0.026 of its size on average (root of mean squares).
    assert (layer(x).double() - exact).norm() / exact.norm() < 0.04
    assert layer(x.bfloat16(), torch.float32).dtype == torch.float32


def test_it_computes_what_the_rounded_numbers_say():
    x, weight = random(20, 64), random(48, 64)
    (numbers, units), (columns, scales) = round_rows(x), round_rows(weight)
    exact = (numbers.double() @ columns.double().t()) * units.double()[:, None] * scales.double()
    torch.testing.assert_close(Fp8Linear(weight)(x).double(), exact, rtol=2**-8, atol=1e-5)  # a step of bfloat16


def test_a_row_depends_on_no_other():
    x, layer = random(20, 64), Fp8Linear(random(48, 64))
    loud = x.clone()
    loud[7] *= 1e4
    torch.testing.assert_close(layer(loud)[:7], layer(x)[:7], rtol=0, atol=0)
    assert layer(x[:0]).shape == (0, 48)


def test_rows_that_are_not_finite_stay_so_and_zeros_are_zero():
    x = random(4, 64)
    x[0, 3], x[1, 5], x[2] = float("inf"), float("nan"), 0.0
    found = Fp8Linear(random(32, 64))(x)
    assert found[:2].isnan().all()
    assert not found[2].any()
    assert found[3].isfinite().all()


def test_large_weights_are_rounded_in_parts(monkeypatch):
    weight = random(50, 64)
    whole = round_weight(weight)
    monkeypatch.setattr("tokenloom.gpu_worker.layers.fp8_linear._AT_ONCE", 7 * 64)
    values, scales = round_weight(weight)
    assert torch.equal(values.view(torch.uint8), whole[0].view(torch.uint8))
    assert torch.equal(scales, whole[1])


def test_shapes_that_the_tensor_cores_do_not_multiply_stay_as_they_are():
    assert not isinstance(make_linear(random(40, 64), None, FP8), Fp8Linear)
    with pytest.raises(ValueError, match="whole 16s"):
        Fp8Linear(random(40, 64))

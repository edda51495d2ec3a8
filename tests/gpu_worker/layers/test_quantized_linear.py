"""Layers of 4 and 8 bits compute what the rounded numbers say, and each row by itself."""

import math
import weakref

import pytest
import torch

from tokenloom.gpu_worker.checkpoint.files import quantized_weight
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import (
    Float4Weight,
    QuantizedWeight,
    round_to_4_bits,
    round_to_8_bits,
)
from tokenloom.gpu_worker.checkpoint.model_config import INT4
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import linear, quantized_linear
from tokenloom.gpu_worker.layers.linear import make_linear, make_output, make_quantized
from tokenloom.gpu_worker.layers.quantized_linear import QuantizedLinear


def available() -> bool:
    try:
        library.load_quantized()
    except KernelsUnavailable:
        return False
    return True


needs_kernel = pytest.mark.skipif(not available(), reason="no AVX2, or no compiler")


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def integers(low: int, high: int, *size: int) -> torch.Tensor:
    return torch.randint(low, high + 1, size, generator=torch.Generator().manual_seed(sum(size))).to(torch.int8)


def without_kernels(monkeypatch):
    def refuse(march: str = "native"):
        raise KernelsUnavailable("none")

    monkeypatch.setattr(quantized_linear, "load_quantized", refuse)
    monkeypatch.setattr(quantized_weight, "load_quantized", refuse)


def floats4(outputs: int, inputs: int) -> Float4Weight:
    """Random codes, all of them, and exponents of which the largest is far beyond float16."""
    generator = torch.Generator().manual_seed(outputs)
    blocks = torch.randint(0, 256, (outputs, inputs // 2), generator=generator, dtype=torch.uint8)
    exponents = torch.randint(90, 131, (outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    return Float4Weight(blocks, exponents)


def weights(outputs: int, inputs: int, group: int) -> dict[str, QuantizedWeight | Float4Weight]:
    """Every kind of weight, with scales and offsets that float16 holds."""
    shape = (outputs, inputs // group)
    scales, offsets = (random(*shape) / 64).half().float(), (random(*shape) / 16).half().float()
    four, eight = integers(-8, 7, outputs, inputs), integers(-128, 127, outputs, inputs)
    return {
        "4 bits": QuantizedWeight(four, scales, None, group),
        "4 bits from 0, with offsets": QuantizedWeight(four + 8, scales, offsets, group),
        "8 bits": QuantizedWeight(eight, scales, None, group),
        "8 bits, with offsets": QuantizedWeight(eight, scales, offsets, group),
        "4 bits, floats": floats4(outputs, inputs),
    }


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return x as the kernel rounds it, in float64."""
    groups = x.float().view(len(x), -1, 32)
    top = groups.abs().amax(2, keepdim=True)
    factors = torch.where(top > 0, torch.full_like(top, 127) / top, 0.0)
    return ((groups * factors).round().double() * (top / 127).double()).view(x.shape)


def exactly(x, weight: QuantizedWeight | Float4Weight, bias) -> torch.Tensor:
    result = rounded(x) @ weight.dequantize().double().t()
    return result if bias is None else result + bias.double()


@needs_kernel
@pytest.mark.parametrize("rows", [1, 5, 128, 131])
@pytest.mark.parametrize(("outputs", "inputs", "group"), [(16, 32, 32), (40, 128, 64), (96, 256, 128), (1, 96, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_kernel_computes_what_the_integers_say(rows, outputs, inputs, group, bias, two_threads):
    offset, x = random(outputs) if bias else None, random(rows, inputs)
    for kind, weight in weights(outputs, inputs, group).items():
        layer = QuantizedLinear(weight, offset)
        assert layer.bits == int(kind[0])
        expected = exactly(x, weight, offset)
        scale = float(expected.abs().max())
        torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5 * scale, msg=kind)
        found = layer(x.bfloat16(), torch.float32)
        expected = exactly(x.bfloat16(), weight, offset)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-3 * scale, msg=kind)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_no_other(dtype, two_threads):
    x = random(150, 128).to(dtype)
    x[3] *= 1000
    for weight in weights(48, 128, 32).values():
        layer = QuantizedLinear(weight)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
        assert torch.equal(layer(x), alone)
        assert torch.equal(layer(x[5:28]), alone[5:28])


@needs_kernel
def test_an_outlier_costs_only_its_group_precision():
    weight, x = round_to_4_bits(random(64, 512)), random(8, 512)
    x[:, 7] = 300
    expected = x @ weight.dequantize().t()
    ours = (QuantizedLinear(weight)(x) - expected).norm()
    units = x.abs().amax(1, keepdim=True) / 127
    by_row = (((x / units).round() * units) @ weight.dequantize().t() - expected).norm()
    assert ours < 0.4 * by_row


@needs_kernel
def test_numbers_that_are_not_finite_stay_visible_in_their_row_only():
    layer, x = QuantizedLinear(round_to_4_bits(random(16, 64))), random(4, 64)
    x[1, 40], x[2, 3] = math.nan, math.inf
    found = layer(x)
    assert not found[1].isfinite().any()
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 3]], layer(x[[0, 3]]))


@needs_kernel
def test_scales_of_any_size_keep_their_precision():
    weight, x = round_to_4_bits(random(16, 64)), random(2, 64)
    expected = QuantizedLinear(weight)(x)
    for factor in (1e-20, 1e-6, 1e6, 1e20):
        scaled = QuantizedWeight(weight.values, weight.scales * factor, None, 32)
        assert (QuantizedLinear(scaled)(x) / factor - expected).norm() < 1e-3 * expected.norm()


@needs_kernel
def test_rows_of_zeros_stay_zeros():
    weight, x = random(32, 64), random(3, 64)
    weight[5], x[1] = 0, 0
    for layer in (make_linear(weight, None, INT4), make_output(weight, INT4)):
        found = layer(x)
        assert found.isfinite().all()
        assert not found[:, 5].any()
        assert not found[1].any()
        assert found[0].abs().sum() > 0


@needs_kernel
def test_the_kernel_rounds_as_pytorch_does(monkeypatch):
    weight = random(64, 256)
    weight[3, :32], weight[5] = 0, random(256) * 1e-9
    for group in (32, 128):
        found = round_to_4_bits(weight, group)
        with monkeypatch.context() as patch:
            without_kernels(patch)
            expected = round_to_4_bits(weight, group)
        # The order of sums decides between scales that are equally good.
        assert (found.values != expected.values).float().mean() < 0.01
        torch.testing.assert_close(found.scales, expected.scales, rtol=0.2, atol=1e-6)
        errors = [(each.dequantize() - weight).norm() for each in (found, expected)]
        torch.testing.assert_close(errors[0], errors[1], rtol=1e-4, atol=0)


@needs_kernel
def test_int4_layers_are_near_those_that_they_round():
    weight, bias, x = random(64, 512).bfloat16(), random(64).bfloat16(), random(8, 512).bfloat16()
    exact = torch.nn.functional.linear(x.float(), weight.float(), bias.float())
    layer = make_linear(weight, bias, INT4)
    assert isinstance(layer, QuantizedLinear)
    assert layer.bits == 4
    assert 0.01 < (layer(x).float() - exact).norm() / exact.norm() < 0.12
    output = make_output(weight, INT4)
    assert isinstance(output, QuantizedLinear)
    assert output.bits == 8
    exact = x.float() @ weight.float().t()
    assert (output(x, torch.float32) - exact).norm() / exact.norm() < 0.01


def test_without_the_kernel_the_rounded_weight_is_multiplied_in_its_dtype(monkeypatch, caplog):
    without_kernels(monkeypatch)
    weight, x = random(32, 64), random(3, 64)
    found = make_linear(weight, None, INT4)(x)
    torch.testing.assert_close(found, x @ round_to_4_bits(weight).dequantize().t(), rtol=1e-4, atol=1e-4)
    make_linear(weight, None, INT4)
    (record,) = caplog.records
    assert "none" in record.getMessage()


def test_groups_that_the_kernel_does_not_know_are_computed_in_the_dtype():
    weight, x = round_to_4_bits(random(32, 48), 16), random(3, 48)
    found = make_quantized(weight, None, torch.float32)(x)
    torch.testing.assert_close(found, x @ weight.dequantize().t(), rtol=1e-4, atol=1e-4)
    assert not isinstance(make_linear(random(32, 48), None, INT4), QuantizedLinear)


def test_layers_without_content_are_not_rounded():
    weight = torch.empty(32, 64, device="meta")
    assert isinstance(make_linear(weight, None, INT4), linear.PlainLinear)
    assert isinstance(make_output(weight, INT4), linear.PlainLinear)


def test_a_cpu_that_lacks_what_it_needs(monkeypatch):
    build = library.build
    monkeypatch.setattr(library, "build", lambda source, *_: build(source, "x86-64"))
    with pytest.raises(KernelsUnavailable, match="the CPU has no AVX2"):
        library.load_quantized.__wrapped__()


@needs_kernel
def test_the_weight_itself_is_released():
    weight = random(64, 64)
    eight = round_to_8_bits(weight)
    gone, gone_too = weakref.ref(weight), weakref.ref(eight)
    layers = make_linear(weight, None, INT4), QuantizedLinear(eight)
    del weight, eight
    assert gone() is None
    assert gone_too() is None
    assert all(layer(random(2, 64), torch.float64).dtype == torch.float64 for layer in layers)

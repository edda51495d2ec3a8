"""Layers of 8-bit floats: what rounding costs, and that rows are rounded each by itself."""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu_worker.kernels import emulation
from tests.gpu_worker.parallel.test_torch_group import run_ranks
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import FloatWeight
from tokenloom.gpu_worker.checkpoint.model_config import FP8
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.levels import processor_features
from tokenloom.gpu_worker.layers import fp8_linear
from tokenloom.gpu_worker.layers.fp8_linear import Fp8Linear, WidenedLinear, round_rows, round_weight
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


def test_ranks_round_their_parts_of_rows_as_one_does(tmp_path):
    weight, x = random(48, 128), random(20, 128)
    x[3, 100], x[5, 2], x[7] = torch.nan, 400.0, 0.0
    (values, scales), (numbers, units) = round_weight(weight), round_rows(x)

    def compute(group):
        own = slice(64 * group.rank, 64 * (group.rank + 1))
        layer = Fp8Linear(values[:, own].contiguous(), None, scales, group)
        rounded, found = layer._rounded(x[:, own])
        assert torch.equal(rounded.float().nan_to_num(9e9), numbers[:, own].float().nan_to_num(9e9))
        assert torch.equal(found.nan_to_num(9e9), units.nan_to_num(9e9))
        return layer(x[:, own])

    added = sum(run_ranks(2, tmp_path, compute))
    torch.testing.assert_close(added, Fp8Linear(weight)(x), rtol=2**-7, atol=0.15, equal_nan=True)


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


WIDENED = [(1, 64, 128, 128), (3, 70, 96, 96), (5, 130, 640, 320), (17, 40, 256, 128), (300, 64, 192, 64)]
"""Rows, outputs, inputs, inputs of a group."""


def float_weight(outputs: int, inputs: int, group: int) -> FloatWeight:
    """Return a weight that has every number of e4m3 but NaN."""
    codes = torch.arange(outputs * inputs).view(outputs, inputs) * 37 % 256
    codes[codes & 127 == 127] = 8
    scales = random(outputs, -(-inputs // group)).abs() + 0.1
    return FloatWeight(codes.to(torch.uint8).view(torch.float8_e4m3fn), scales, group)


def dequantized(weight: FloatWeight) -> torch.Tensor:
    """Return the numbers as the OCP's specification of e4m3 defines them, times their scales, in float64."""
    codes = weight.values.view(torch.uint8).int()
    sign, exponent, mantissa = 1.0 - 2.0 * (codes >> 7), (codes >> 3) & 15, (codes & 7).double()
    numbers = sign * torch.where(exponent == 0, mantissa / 8 * 2**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    return numbers * weight.scales.double().repeat_interleave(weight.group, 1)[:, : codes.shape[1]]


REAL_VECTORS = """<immintrin.h>
#include <cstdint>
#include <cstring>
inline float from_bf16(uint16_t bits) {
  const uint32_t wide = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &wide, sizeof x);
  return x;
}
"""
"""What the matrix unit's header includes instead of vectors in plain C++."""
NEEDED = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl", "cooperlake": "avx512_bf16", "emulated AMX": "avx512_bf16"}


@pytest.fixture(params=[*NEEDED, "native"], scope="module")
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let layers use the kernel for this level, or one with the matrix unit in plain C++ beside the real AVX-512."""
    needed = NEEDED.get(request.param, "avx2")
    if needed not in processor_features():
        pytest.skip(f"the processor has no {needed}")
    with pytest.MonkeyPatch.context() as patch:
        march = request.param
        if march == "emulated AMX":
            folder, march = tmp_path_factory.mktemp("kernels"), "native"
            header = (emulation.HERE / "matrix_unit.h").read_text()
            (folder / "unit.h").write_text(header.replace('"wider_vectors.h"', REAL_VECTORS))
            patch.setattr(emulation, "FLAGS", (*emulation.FLAGS, "-march=cooperlake"))
            path = emulation.build_emulated("float8", folder, header=str(folder / "unit.h"))
            patch.setattr(library, "build", lambda *_: path)
        kernels = library.load_float8.__wrapped__(march)
        patch.setattr(fp8_linear, "load_float8", lambda: kernels)
        yield


@pytest.mark.parametrize(("rows", "outputs", "inputs", "group"), WIDENED)
def test_widened_weights_are_those_that_are_stored(rows, outputs, inputs, group, level):
    x, bias, weight = random(rows, inputs).bfloat16(), random(outputs), float_weight(outputs, inputs, group)
    layer, exact = WidenedLinear([weight], bias), x.double() @ dequantized(weight).t() + bias.double()
    found = layer(x)
    # A step of bfloat16, in which the result is stored, and an error of sums that is little next to their size.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=float(exact.std()) * 1e-3)
    one_by_one = torch.cat([layer(row[None]) for row in x])
    assert torch.equal(found, one_by_one)  # whatever the other rows are
    assert layer(x[:0]).shape == (0, outputs)
    assert layer(x, torch.float32).dtype == torch.float32


def test_each_number_is_widened_exactly(level):
    """One input of one: the result is the number itself, subnormal ones and both zeros included."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127]
    numbers = codes.view(torch.float8_e4m3fn)[:, None].expand(-1, 2).contiguous()
    layer = WidenedLinear([FloatWeight(numbers, torch.ones(254, 1), 2)])
    one = torch.tensor([[1.0, 0.0]]).bfloat16()
    assert torch.equal(layer(one)[0].float(), codes.view(torch.float8_e4m3fn).float())
    many = layer(one.expand(20, -1))
    assert torch.equal(many, many[:1].expand(20, -1))


@pytest.mark.parametrize("rows", [3, 20])
def test_what_is_not_finite_stays_so(rows, level):
    weight = float_weight(66, 256, 128)
    weight.values.view(torch.uint8)[65, 200] = 0xFF  # NaN, in the second group of the last output
    x = random(rows, 256).bfloat16()
    x[1, 7], x[2, 9] = float("inf"), float("nan")
    found = WidenedLinear([weight])(x)
    assert found[:, 65].isnan().all()
    assert found[0, :65].isfinite().all()
    assert found[3:, :65].isfinite().all()
    assert not found[1].isfinite().any()
    assert found[2].isnan().all()


def test_outputs_of_several_weights_follow_each_other():
    weights = [float_weight(size, 128, 64) for size in (70, 6, 64)]
    x = random(4, 128).bfloat16()
    joined = WidenedLinear(weights)(x)
    assert torch.equal(joined, torch.cat([WidenedLinear([each])(x) for each in weights], 1))


def test_weights_that_no_kernel_takes_are_refused():
    with pytest.raises(KernelsUnavailable, match="differ in their inputs or groups"):
        WidenedLinear([float_weight(64, 128, 64), float_weight(64, 128, 128)])

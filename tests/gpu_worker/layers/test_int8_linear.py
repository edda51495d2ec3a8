"""int8 layers: the kernel computes what the integers say, and each row by itself."""

import weakref

import pytest
import torch

from tests.gpu_worker.parallel.test_torch_group import run_ranks
from tokenloom.gpu_worker.checkpoint.model_config import INT8_DYNAMIC
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import quantized_linear as int8_linear
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.layers.quantized_linear import (
    Int8Linear,
    QuantizedLinear,
    SharedInt8Linear,
    make_shared_int8,
    round_rows,
)


def available() -> bool:
    try:
        library.load_int8()
    except KernelsUnavailable:
        return False
    return True


needs_unit = pytest.mark.skipif(not available(), reason="no matrix unit")


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def without_unit(monkeypatch):
    def refuse(*_):
        raise KernelsUnavailable("none")

    monkeypatch.setattr(int8_linear, "load_int8", refuse)
    return refuse


def without_kernels(monkeypatch):
    monkeypatch.setattr(int8_linear, "QuantizedLinear", without_unit(monkeypatch))


def exactly(x, weight, bias):
    """By integers in int64."""
    (rows, units), (columns, scales) = round_rows(x), round_rows(weight)
    result = (rows.long() @ columns.long().t()) * (units.double()[:, None] * scales.double())
    return result if bias is None else result + bias.double()


@needs_unit
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 33, 256, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 64), (96, 192), (64, 2048)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_kernel_computes_what_the_integers_say(rows, outputs, inputs, bias):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    weight, offset, x = random(outputs, inputs), random(outputs) if bias else None, random(rows, inputs)
    layer = make_linear(weight, offset, INT8_DYNAMIC)
    torch.testing.assert_close(layer(x).double(), exactly(x, weight, offset), rtol=1e-5, atol=1e-5)
    found = layer(x.bfloat16())
    assert found.dtype == torch.bfloat16
    expected = exactly(x.bfloat16(), weight, offset).bfloat16()
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
    torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 64), (32, 100), (96, 192)])
def test_without_kernels_pytorch_computes_the_same(outputs, inputs, monkeypatch):
    without_kernels(monkeypatch)
    weight, bias, x = random(outputs, inputs), random(outputs), random(5, inputs)
    found = Int8Linear(weight, bias)(x)
    torch.testing.assert_close(found.double(), exactly(x, weight, bias), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_unit_inputs_are_rounded_in_groups(dtype, monkeypatch, caplog):
    without_unit(monkeypatch)
    weight, bias, x = random(48, 192), random(48), random(5, 192).to(dtype)
    layer = Int8Linear(weight, bias)
    if layer._grouped is None:
        pytest.skip("no AVX2")
    columns, scales = round_rows(weight)
    expected = x.double() @ (columns.double() * scales.double()[:, None]).t() + bias.double()
    found = layer(x)
    assert found.dtype == dtype
    assert (found.double() - expected).norm() < 0.01 * expected.norm()
    assert torch.equal(found, torch.cat([layer(row[None]) for row in x]))
    assert layer(x, torch.float32).dtype == torch.float32
    assert not caplog.records


def test_the_slower_way_is_told_of_once(monkeypatch, caplog):
    without_kernels(monkeypatch)
    Int8Linear(random(32, 64)), Int8Linear(random(32, 64))
    (record,) = caplog.records
    assert "int8 layers: none; none" in record.getMessage()


@pytest.mark.parametrize("kernels", [True, False])
def test_a_row_depends_on_no_other(kernels, monkeypatch):
    if not kernels:
        without_kernels(monkeypatch)
    layer, x = Int8Linear(random(64, 128)), random(40, 128)
    x[3] *= 1000
    assert torch.equal(layer(x)[:3], layer(x[:3]))
    assert torch.equal(layer(x)[4:], torch.cat([layer(x[i : i + 1]) for i in range(4, 40)]))


def test_it_is_near_the_layer_that_it_rounds():
    weight, x = random(64, 512), random(8, 512)
    exact = x @ weight.t()
    error = (Int8Linear(weight)(x) - exact).norm() / exact.norm()
    assert 0 < error < 0.02


@pytest.mark.parametrize("kernels", [True, False])
def test_rows_and_outputs_of_zeros_stay_zeros(kernels, monkeypatch):
    if not kernels:
        without_kernels(monkeypatch)
    weight, x = random(32, 64), random(3, 64)
    weight[5], x[1] = 0, 0
    found = Int8Linear(weight)(x)
    assert found.isfinite().all()
    assert not found[:, 5].any()
    assert not found[1].any()
    assert found[0].abs().sum() > 0


def test_the_weight_itself_is_released():
    weight = random(64, 64)
    gone = weakref.ref(weight)
    layer = Int8Linear(weight)
    del weight
    assert gone() is None
    assert layer(random(2, 64), torch.float64).dtype == torch.float64


def of_ranks(weight, bias, x, directory, *, adds):
    """What two ranks compute, each with the layer of its half of the inputs."""
    values, scales = round_rows(weight)
    inputs = weight.shape[1]

    def compute(group):
        own = slice(inputs // 2 * group.rank, inputs // 2 * (group.rank + 1))
        layer = make_shared_int8(values[:, own].contiguous(), scales, bias, inputs, group, adds=adds)
        return layer, layer(x[:, own])

    return run_ranks(2, directory, compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_have_the_bits_of_one_with_pytorch(dtype, tmp_path, monkeypatch):
    without_kernels(monkeypatch)
    weight, bias, x = random(33, 100), random(33), random(9, 100).to(dtype)
    x[2, 0], x[4, 99] = torch.nan, torch.inf
    expected = Int8Linear(weight, bias)(x)
    for layer, found in of_ranks(weight, bias, x, tmp_path, adds=True):
        assert isinstance(layer, SharedInt8Linear)
        assert torch.equal(found.nan_to_num(9e9), expected.nan_to_num(9e9))
        assert found.isnan().all(1).nonzero().flatten().tolist() == [2, 4]


def test_parts_that_a_caller_adds(tmp_path, monkeypatch):
    without_kernels(monkeypatch)
    weight, bias, x = random(32, 128), random(32), random(9, 128)
    parts = [found for _, found in of_ranks(weight, bias, x, tmp_path, adds=False)]
    torch.testing.assert_close(sum(parts), Int8Linear(weight, bias)(x))


def test_in_groups_each_rank_computes_its_part(tmp_path, monkeypatch):
    """The groups of one rank are those of both, so that integers are the same."""
    without_unit(monkeypatch)
    weight, bias, x = random(32, 128), random(32), random(9, 128)
    whole = Int8Linear(weight, bias)
    if whole._grouped is None:
        pytest.skip("no AVX2")
    found = of_ranks(weight, bias, x, tmp_path, adds=True)
    assert all(isinstance(layer, QuantizedLinear) for layer, _ in found)
    torch.testing.assert_close(sum(part for _, part in found), whole(x))

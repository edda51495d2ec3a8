"""Products of few rows are those of oneDNN, whose packed matrix they read."""

from ctypes import c_float, c_int16

import pytest
import torch

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import few_rows
from tokenloom.gpu_worker.layers.few_rows import FewRows
from tokenloom.gpu_worker.layers.packed_linear import PackedLinear, can_pack

packs_here = can_pack(torch.device("cpu"), torch.bfloat16)


def available() -> bool:
    try:
        library.load_few_rows()
    except KernelsUnavailable:
        return False
    return packs_here


needs_unit = pytest.mark.skipif(not available(), reason="no matrix unit")


@pytest.fixture
def set_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


@needs_unit
@pytest.mark.parametrize("rows", [1, 7, 16, 17, 31, 32])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (32, 96), (416, 2048)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_onednn(rows, outputs, inputs, bias, threads, set_threads):
    set_threads(threads)
    weight, offset, x = random(outputs, inputs), random(outputs) if bias else None, random(rows, inputs)
    packed = PackedLinear(weight, offset)
    assert packed._few_rows is not None
    many = packed._multiply(x, packed._weight, offset, "none", [], "")
    assert torch.equal(packed(x), many)
    assert torch.equal(packed(x, torch.float32), many.float())


@needs_unit
def test_more_rows_are_onednn_s():
    packed = PackedLinear(random(64, 32))
    packed._few_rows = None
    x = random(33, 32)
    assert torch.equal(PackedLinear(random(64, 32))(x), packed(x))


@needs_unit
def test_rows_that_lie_apart():
    packed, wide = PackedLinear(random(64, 32)), random(8, 96)
    assert torch.equal(packed(wide[:, 32:64]), packed(wide[:, 32:64].contiguous()))


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 48), torch.bfloat16),
        ((48, 64), torch.bfloat16),
        ((64, 64), torch.float32),
    ],
)
def test_shapes_that_a_kernel_does_not_know(shape, dtype):
    with pytest.raises(KernelsUnavailable, match="a matrix of"):
        FewRows(torch.zeros(shape, dtype=dtype), shape, None)


class Fake:
    """A kernel that computes ``factor`` times the product."""

    def __init__(self, weight: torch.Tensor, factor: float) -> None:
        self._weight, self._factor = weight.float(), factor

    def multiply(self, rows, matrix, bias, out, num_rows, inputs, outputs, to_float, threads) -> None:
        x = torch.frombuffer((c_int16 * (num_rows * inputs)).from_address(rows), dtype=torch.bfloat16)
        number, dtype = (c_float, torch.float32) if to_float else (c_int16, torch.bfloat16)
        y = torch.frombuffer((number * (num_rows * outputs)).from_address(out), dtype=dtype)
        y.copy_((x.float().view(num_rows, inputs) @ self._weight.t()).flatten() * self._factor)


@pytest.mark.skipif(not packs_here, reason="oneDNN cannot pack here")
@pytest.mark.parametrize("factor", [1, 2])
def test_a_kernel_that_does_not_agree_with_onednn_computes_nothing(factor, monkeypatch):
    """oneDNN does not document the layout that it chose, so one product is compared."""
    weight, x = random(64, 32), random(3, 32)
    monkeypatch.setattr(few_rows, "load_few_rows", lambda: Fake(weight, factor))
    packed = PackedLinear(weight)
    assert (packed._few_rows is not None) == (factor == 1)
    torch.testing.assert_close(packed(x), x @ weight.t(), rtol=2e-2, atol=2e-2)


def test_a_cpu_without_the_unit(monkeypatch):
    """As built for one that has it."""
    build = library.build
    monkeypatch.setattr(library, "build", lambda source, march: build(source, "x86-64"))
    with pytest.raises(KernelsUnavailable, match="the CPU has no"):
        library.load_few_rows.__wrapped__()

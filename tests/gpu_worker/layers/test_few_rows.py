"""Products of few rows are those of oneDNN, whose packed matrix they read."""

from ctypes import c_float

import pytest
import torch

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import few_rows
from tokenloom.gpu_worker.layers.few_rows import KERNELS, FewRows, Kernel
from tokenloom.gpu_worker.layers.packed_linear import PackedLinear, can_pack


def available(load, dtype) -> bool:
    try:
        load()
    except KernelsUnavailable:
        return False
    return can_pack(torch.device("cpu"), dtype)


needs_unit = pytest.mark.skipif(not available(library.load_few_rows, torch.bfloat16), reason="no matrix unit")
needs_registers = pytest.mark.skipif(not available(library.load_few_float_rows, torch.float32), reason="no AVX2")


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


@needs_registers
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 36, 37, 64, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 16), (320, 208), (512, 1024)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_float32_is_as_exact_as_onednn(rows, outputs, inputs, bias, threads, set_threads):
    set_threads(threads)
    weight, offset, x = (random(*size).float() for size in ((outputs, inputs), (outputs,), (rows, inputs)))
    packed = PackedLinear(weight, offset if bias else None)
    assert packed._few_rows is not None
    exact = torch.nn.functional.linear(x.double(), weight.double(), offset.double() if bias else None)
    torch.testing.assert_close(packed(x).double(), exact, rtol=1e-5, atol=1e-4)
    assert torch.equal(packed(x)[-1:], packed(x[-1:])), "a row depends on no other"


@needs_registers
def test_any_number_of_float32_rows_has_the_kernel():
    packed, x = PackedLinear(random(64, 32).float()), random(1000, 32).float()
    assert packed._few_rows is not None
    assert torch.equal(packed(x), packed._few_rows(x, torch.float32))


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
        ((96, 64), torch.float32),
        ((64, 40), torch.float32),
    ],
)
def test_shapes_that_a_kernel_does_not_know(shape, dtype):
    with pytest.raises(KernelsUnavailable, match="a matrix of"):
        FewRows(torch.zeros(shape, dtype=dtype), shape, None, KERNELS[dtype])


class Fake:
    """A kernel that computes ``factor`` times the product."""

    def __init__(self, weight: torch.Tensor, factor: float) -> None:
        self._weight, self._factor = weight, factor

    def multiply(self, rows, matrix, bias, out, num_rows, inputs, outputs, to_float, threads) -> None:
        x = torch.frombuffer((c_float * (num_rows * inputs)).from_address(rows), dtype=torch.float32)
        y = torch.frombuffer((c_float * (num_rows * outputs)).from_address(out), dtype=torch.float32)
        y.copy_((x.view(num_rows, inputs) @ self._weight.t()).flatten() * self._factor)


@pytest.mark.skipif(not can_pack(torch.device("cpu"), torch.float32), reason="oneDNN cannot pack here")
@pytest.mark.parametrize("factor", [1, 2])
def test_a_kernel_that_does_not_agree_with_onednn_computes_nothing(factor, monkeypatch):
    """oneDNN does not document the layout that it chose, so one product is compared."""
    weight, x = random(64, 32).float(), random(3, 32).float()
    fake = Fake(weight, factor)
    monkeypatch.setitem(few_rows.KERNELS, torch.float32, Kernel(lambda: fake, 32, 16, 1e-4))
    packed = PackedLinear(weight)
    assert (packed._few_rows is not None) == (factor == 1)
    torch.testing.assert_close(packed(x), x @ weight.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("load", [library.load_few_rows, library.load_bfloat16_dots, library.load_few_float_rows])
def test_a_cpu_that_lacks_what_they_need(load, monkeypatch):
    """As built for one that does."""
    build = library.build
    monkeypatch.setattr(library, "build", lambda source, march: build(source, "x86-64"))
    with pytest.raises(KernelsUnavailable, match="the CPU has no"):
        load.__wrapped__()

"""bfloat16 layers without bfloat16 instructions compute in float32, and each row by itself."""

import weakref

import pytest
import torch

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.layers.bfloat16_linear import Bfloat16Linear
from tokenloom.gpu_worker.layers.linear import PlainLinear, make_linear


def available() -> bool:
    try:
        library.load_bfloat16()
    except KernelsUnavailable:
        return False
    return True


needs_kernel = pytest.mark.skipif(not available(), reason="no FMA, or no compiler")


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 96, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (1, 7), (503, 130)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_in_float32(rows, outputs, inputs, bias):
    weight, offset, x = random(outputs, inputs), random(outputs) if bias else None, random(rows, inputs)
    layer = Bfloat16Linear(weight, offset)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = layer(x)
    torch.set_num_threads(before)
    exact = torch.nn.functional.linear(x.double(), weight.double(), offset.double() if bias else None)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
    assert torch.equal(layer(x, torch.float32), found.float())
    assert torch.equal(found, torch.cat([layer(x[i : i + 1]) for i in range(rows)])), "a row depends on no other"


@needs_kernel
def test_it_replaces_plain_layers_where_onednn_cannot_pack(monkeypatch):
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    assert isinstance(make_linear(random(32, 64)), Bfloat16Linear)
    assert isinstance(make_linear(random(32, 64).float()), PlainLinear)
    assert isinstance(make_linear(random(32, 64).to("meta")), PlainLinear)


@needs_kernel
def test_the_weight_itself_is_released():
    weight = random(64, 64)
    gone = weakref.ref(weight)
    layer = Bfloat16Linear(weight)
    del weight
    assert gone() is None
    assert layer(random(8, 192)[:, 64:128]).shape == (8, 64)


def test_a_cpu_that_lacks_what_it_needs(monkeypatch):
    build = library.build
    monkeypatch.setattr(library, "build", lambda source, march: build(source, "x86-64"))
    with pytest.raises(KernelsUnavailable, match="the CPU has no FMA"):
        library.load_bfloat16.__wrapped__()

"""bfloat16 layers in panels of our own compute each row by itself, with and without instructions for such numbers."""

import weakref

import pytest
import torch

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.kernels.levels import processor_features
from tokenloom.gpu_worker.layers import bfloat16_linear, linear
from tokenloom.gpu_worker.layers.bfloat16_linear import Bfloat16Linear
from tokenloom.gpu_worker.layers.linear import PlainLinear, make_linear
from tokenloom.gpu_worker.layers.packed_linear import PackedLinear


def available(load) -> bool:
    try:
        load()
    except KernelsUnavailable:
        return False
    return True


needs_kernel = pytest.mark.skipif(not available(library.load_bfloat16), reason="no FMA, or no compiler")


@pytest.fixture(params=["dots", "floats"])
def each_kernel(request, monkeypatch):
    """Both kernels, where the processor has them."""
    if request.param == "floats":
        monkeypatch.setattr(bfloat16_linear, "load_bfloat16_dots", library.load_bfloat16)
    elif not available(library.load_bfloat16_dots):
        pytest.skip("no AVX-512 BF16")


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 96, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (1, 7), (503, 130)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_sums_in_float32(rows, outputs, inputs, bias, each_kernel):
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
@pytest.mark.parametrize("shape", [(16, 32), (1, 7), (130, 1), (65, 34)])
def test_it_gives_its_weight_back(shape, each_kernel):
    weight = random(*shape)
    assert torch.equal(Bfloat16Linear(weight).unpacked(), weight)


@pytest.mark.skipif(not available(library.load_bfloat16_dots), reason="no AVX-512 BF16")
@pytest.mark.parametrize("has_unit", [True, False])
def test_it_replaces_onednn_where_it_is_faster(has_unit, monkeypatch):
    features = processor_features() - {"amx_bf16"} | ({"amx_bf16"} if has_unit else set())
    monkeypatch.setattr(bfloat16_linear, "processor_features", lambda: features)
    bfloat16_linear.outruns_onednn.cache_clear()
    found = make_linear(random(32, 64))
    bfloat16_linear.outruns_onednn.cache_clear()
    assert isinstance(found, PackedLinear if has_unit else Bfloat16Linear)


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

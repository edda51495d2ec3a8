"""Layers in panels of our own compute each row by itself, in float32 and with and without bfloat16 instructions."""

import functools
import weakref
from typing import NoReturn

import pytest
import torch

from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import linear, panel_linear
from tokenloom.gpu_worker.layers.linear import PlainLinear, make_linear
from tokenloom.gpu_worker.layers.panel_linear import PanelLinear


def available(load) -> bool:
    try:
        load()
    except KernelsUnavailable:
        return False
    return True


needs_kernel = pytest.mark.skipif(not available(library.load_bfloat16), reason="no FMA, or no compiler")


@pytest.fixture(params=["tiles", "dots", "words", "floats", "narrow floats"])
def dtype(request, monkeypatch):
    """The dtype of each kernel that the processor has."""
    if request.param in ("dots", "words"):
        monkeypatch.setattr(panel_linear, "load_bfloat16_tiles", library.load_bfloat16_dots)
    if request.param == "words":
        monkeypatch.setattr(panel_linear, "load_bfloat16_tiles", library.load_bfloat16)
    elif request.param == "narrow floats":
        monkeypatch.setattr(panel_linear, "load_floats", functools.partial(library.load_floats, "haswell"))
    elif request.param == "dots" and not available(library.load_bfloat16_dots):
        pytest.skip("no AVX-512 BF16")
    elif request.param == "tiles" and not available(library.load_bfloat16_tiles):
        pytest.skip("no matrix unit")
    return torch.float32 if "floats" in request.param else torch.bfloat16


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)


@needs_kernel
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 132, 140])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 32), (1, 7), (503, 130), (64, 1100), (130, 1120)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_sums_in_float32(rows, outputs, inputs, bias, dtype):
    weight, offset, x = (random(*size, dtype=dtype) for size in ((outputs, inputs), (outputs,), (rows, inputs)))
    offset = offset if bias else None
    layer = PanelLinear(weight, offset)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found = layer(x)
    torch.set_num_threads(before)
    exact = torch.nn.functional.linear(x.double(), weight.double(), offset.double() if bias else None)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-4)
    assert torch.equal(layer(x, torch.float32), found.float())
    assert torch.equal(found, torch.cat([layer(x[i : i + 1]) for i in range(rows)])), "a row depends on no other"


@needs_kernel
def test_it_replaces_plain_layers_where_onednn_cannot_pack(monkeypatch):
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    assert isinstance(make_linear(random(32, 64)), PanelLinear)
    assert isinstance(make_linear(random(32, 64).double()), PlainLinear)
    assert isinstance(make_linear(random(32, 64).to("meta")), PlainLinear)


@needs_kernel
@pytest.mark.parametrize("shape", [(16, 32), (1, 7), (130, 1), (65, 34)])
def test_it_gives_its_weight_back(shape, dtype):
    weight = random(*shape, dtype=dtype)
    assert torch.equal(PanelLinear(weight).unpacked(), weight)


def unavailable() -> NoReturn:
    raise KernelsUnavailable("the CPU has none")


@pytest.mark.skipif(not available(library.load_floats), reason="no FMA, or no compiler")
@pytest.mark.parametrize("faster", ["load_bfloat16_tiles", "load_bfloat16_dots", None])
def test_it_replaces_onednn_where_it_is_faster(faster, monkeypatch):
    for name in ("load_bfloat16_tiles", "load_bfloat16_dots"):
        monkeypatch.setattr(panel_linear, name, library.load_floats if name == faster else unavailable)
    panel_linear.outruns_onednn.cache_clear()
    found = panel_linear.outruns_onednn(torch.bfloat16)
    panel_linear.outruns_onednn.cache_clear()
    assert found == (faster is not None)
    assert panel_linear.outruns_onednn(torch.float32)


@needs_kernel
@pytest.mark.parametrize("outputs", [(64, 64, 130), (7, 64, 1)])
def test_weights_that_follow_each_other(outputs, dtype):
    parts = [random(count, 96, dtype=dtype) for count in outputs]
    layer, whole, x = PanelLinear(parts), PanelLinear(torch.cat(parts)), random(5, 96, dtype=dtype)
    assert torch.equal(layer(x), whole(x))
    assert torch.equal(layer.unpacked(), torch.cat(parts))


@needs_kernel
def test_the_weight_itself_is_released():
    weight = random(64, 64)
    gone = weakref.ref(weight)
    layer = PanelLinear(weight)
    del weight
    assert gone() is None
    assert layer(random(8, 192)[:, 64:128]).shape == (8, 64)


@pytest.mark.parametrize(
    "load", [library.load_bfloat16, library.load_bfloat16_dots, library.load_bfloat16_tiles, library.load_floats]
)
def test_a_cpu_that_lacks_what_it_needs(load, monkeypatch):
    """As built for one that does."""
    build = library.build
    monkeypatch.setattr(library, "build", lambda source, *_: build(source, "x86-64"))
    with pytest.raises(KernelsUnavailable, match="the CPU has no"):
        load.__wrapped__()

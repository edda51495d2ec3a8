"""Packed and plain linear layers compute the same."""

import logging
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tokenloom.gpu_worker.checkpoint.weights import Unpackable
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import linear
from tokenloom.gpu_worker.layers import panel_linear as packed_linear
from tokenloom.gpu_worker.layers.linear import PlainLinear, check_products, make_linear
from tokenloom.gpu_worker.layers.panel_linear import PackedLinear, PanelLinear, can_pack
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.process.fall_backs import FallBacks

CPU = torch.device("cpu")
packs = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="oneDNN cannot pack here")


@pytest.fixture(autouse=True)
def probe_again():
    can_pack.cache_clear()
    yield
    can_pack.cache_clear()


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


@packs
@pytest.mark.parametrize("rows", [1, 2, 33, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (1, 7), (503, 130)])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_plain(rows, outputs, inputs, bias):
    weight, offset, x = random(outputs, inputs), random(outputs) if bias else None, random(rows, inputs)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(weight, offset)(x), F.linear(x, weight, offset), rtol=1e-5, atol=5e-5)


@packs
def test_the_weight_itself_is_released():
    weight = random(64, 48)
    gone = weakref.ref(weight)
    layer = make_linear(weight)
    del weight
    assert gone() is None
    assert layer(random(2, 48)).shape == (2, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (1, 7), (503, 130)])
def test_a_layer_gives_its_weight_back_however_it_is_packed(outputs, inputs, dtype):
    weight = random(outputs, inputs).to(dtype)
    layer = make_linear(weight.clone())
    assert isinstance(layer, Unpackable)
    assert torch.equal(layer.unpacked(), weight)
    assert torch.equal(PlainLinear(weight, None).unpacked(), weight)


def test_bfloat16_packs_or_not_but_multiplies():
    weight, x = random(64, 48).bfloat16(), random(5, 48).bfloat16()
    found = make_linear(weight)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, F.linear(x, weight), rtol=2e-2, atol=2e-2)


def test_results_in_another_dtype_are_those_of_the_first():
    weight, x = random(64, 32).bfloat16(), random(40, 32).bfloat16()
    for layer in (make_linear(weight), PlainLinear(weight, None)):
        for rows in (3, 40):
            assert torch.equal(layer(x[:rows], torch.float32), layer(x[:rows]).float())


def test_other_devices_and_dtypes_are_plain():
    assert not can_pack(torch.device("meta"), torch.float32)
    assert isinstance(make_linear(random(4, 4).double()), PlainLinear)


@pytest.mark.parametrize("error", [AttributeError, RuntimeError, TypeError])
def test_operations_that_are_gone_or_refuse_pack_nothing(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr(packed_linear.PackedLinear, "__init__", fail)
    assert not can_pack(CPU, torch.float32)


def test_operations_that_multiply_wrong_pack_nothing(monkeypatch):
    monkeypatch.setattr(packed_linear.PackedLinear, "__call__", lambda self, x, dtype=None: torch.zeros(len(x), 48))
    assert not can_pack(CPU, torch.float32)


@pytest.fixture
def fall_backs(monkeypatch: pytest.MonkeyPatch) -> FallBacks:
    found = FallBacks()
    monkeypatch.setattr(linear, "OF_PROCESS", found)
    return found


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_what_int4_leaves_unquantized_is_named(
    model_impl: str, save_checkpoint: Callable[..., Path], fall_backs: FallBacks
) -> None:
    """64 hidden numbers are two groups of 32, 80 inner ones are not whole groups: each layer's last matrix is left."""
    path = save_checkpoint("llama", intermediate_size=80)
    load_model(path, "bfloat16", quantization="int4", model_impl=model_impl)
    [(kind, detail)] = fall_backs.own()
    attention, gate_up, down = 2 * 64 * 64 + 2 * 64 * 32, 2 * 64 * 80, 64 * 80
    share = (attention + gate_up) / (attention + gate_up + down)
    assert kind == "unquantized"
    assert detail == (
        f"int4 takes {share:.0%} of the weights of linear layers; these keep their dtype, because their inputs are not "
        "multiples of 32: model.layers.N.mlp.down_proj (3)"
    )


def test_a_model_that_int4_takes_whole_is_no_fall_back(
    save_checkpoint: Callable[..., Path], fall_backs: FallBacks, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        load_model(save_checkpoint("llama"), "bfloat16", quantization="int4")
    assert not fall_backs.own()
    assert "int4 takes 100% of the weights of linear layers" in caplog.text


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize("quantization", [None, "int8-dynamic", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 64), (200, 1056)])
def test_a_row_has_the_same_bits_among_others(outputs, inputs, dtype, quantization):
    """As batch-invariant engines need it."""
    check_products(torch.float32)
    layer = make_linear(random(outputs, inputs).to(dtype), random(outputs).to(dtype), quantization)
    x = random(300, inputs).to(dtype)
    whole = layer(x, torch.float32)
    for rows in (1, 2, 3, 6, 7, 16, 17, 33, 133, 200):
        for first in (0, 1, 90):
            assert torch.equal(layer(x[first : first + rows], torch.float32), whole[first : first + rows])


def test_products_whose_sums_follow_the_number_of_rows_are_refused(monkeypatch):
    def fail(*_):
        raise KernelsUnavailable("no compiler")

    monkeypatch.setattr(linear, "outruns_onednn", lambda _: True)
    monkeypatch.setattr(linear, "PanelLinear", type("PanelLinear", (PanelLinear,), {"__init__": fail}))
    with pytest.raises(ValueError, match=r"batch_invariant: PyTorch computes products of torch\.bfloat16"):
        check_products(torch.bfloat16)

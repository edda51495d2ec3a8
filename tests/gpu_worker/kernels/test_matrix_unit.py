"""Products of the matrix unit (AMX): on a processor that has it, and on every one with a header in place of its
instructions."""

import functools
import itertools
import shutil
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import pytest
import torch

from tests.gpu_worker.kernels.emulation import build_emulated
from tests.gpu_worker.parallel.test_torch_group import run_ranks
from tokenloom.gpu_worker.checkpoint.model_config import INT8_DYNAMIC
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.levels import processor_features
from tokenloom.gpu_worker.layers import panel_linear
from tokenloom.gpu_worker.layers import quantized_linear as int8_linear
from tokenloom.gpu_worker.layers.linear import make_linear
from tokenloom.gpu_worker.layers.panel_linear import PanelLinear
from tokenloom.gpu_worker.layers.quantized_linear import Int8Linear, SharedInt8Linear, make_shared_int8, round_rows
from tokenloom.gpu_worker.parallel.group import RankGroup

pytestmark = pytest.mark.skipif(
    not shutil.which("g++") or not {"avx2", "fma"} <= processor_features(), reason="no AVX2, or no compiler"
)


@pytest.fixture(params=["native", "emulated"], scope="module")
def load(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], CDLL]:
    """Loads the kernels of a source."""
    if request.param == "native" and "amx_bf16" not in processor_features():
        pytest.skip("no matrix unit")

    @functools.cache
    def load(source: str) -> CDLL:
        loader = getattr(library, f"load_{source}")
        if request.param == "native":
            return loader()
        path = build_emulated(source, tmp_path_factory.mktemp("kernels"), header="matrix_unit.h")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "build", lambda *_: path)
            return loader.__wrapped__()

    return load


@pytest.fixture(scope="module")
def tiles(load: Callable[[str], CDLL]) -> CDLL:
    return load("bfloat16_tiles")


@pytest.fixture
def layer(tiles: CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[..., PanelLinear]:
    """Makes layers that these kernels compute."""
    monkeypatch.setattr(panel_linear, "load_bfloat16_tiles", lambda: tiles)
    return PanelLinear


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 7, 16, 17, 32, 33, 50, 100])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (1, 96), (49, 64), (130, 1120)])
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16(layer, rows, outputs, inputs, bias, threads):
    weight, offset, x = random(outputs, inputs), random(outputs) if bias else None, random(rows, inputs)
    found = layer(weight, offset)(x)
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
    ends = [0, rows // 3, rows]
    parts = [layer(weight, offset)(x[a:b]) for a, b in itertools.pairwise(ends) if a < b]
    assert torch.equal(found, torch.cat(parts)), "a row depends on no other"


@pytest.mark.parametrize("outputs", [4096, 4100])
def test_large_results(layer, outputs, threads):
    """They are written past the caches where whole panels allow it."""
    weight, x = random(outputs, 64), random(150, 64)
    expected = torch.nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(layer(weight)(x).double(), expected, rtol=2**-8, atol=1e-4)


def test_several_stretches_of_rows(layer, threads):
    weight, x = random(64, 8192), random(100, 8192)
    found = layer(weight)(x)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().t(), rtol=2**-8, atol=1e-3)
    assert torch.equal(found[80:90], layer(weight)(x[80:90]))


def test_no_rows(layer, threads):
    assert layer(random(64, 32))(random(0, 32)).shape == (0, 64)


def test_a_layer_gives_its_weight_back(layer):
    weight = random(49, 96)
    assert torch.equal(layer(weight).unpacked(), weight)


@pytest.mark.parametrize("rows", [1, 16, 17, 300])
def test_int8(load, rows, monkeypatch):
    kernels = load("int8")
    monkeypatch.setattr(int8_linear, "load_int8", lambda: kernels)
    weight, x = random(96, 192).float(), random(rows, 192).float()
    (values, units), (columns, scales) = round_rows(x), round_rows(weight)
    exact = (values.long() @ columns.long().t()) * (units.double()[:, None] * scales.double())
    found = make_linear(weight, None, INT8_DYNAMIC)(x)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_int8_of_ranks_has_the_bits_of_one(load, size: int, dtype: torch.dtype, tmp_path: Path, monkeypatch) -> None:
    kernels = load("int8")
    monkeypatch.setattr(int8_linear, "load_int8", lambda: kernels)
    weight, bias, x = random(96, 384).float(), random(96).float(), random(19, 384).to(dtype)
    x[3], x[5, 0], x[7, -1], x[11, 200] = 0, torch.nan, torch.inf, 300
    whole = Int8Linear(weight, bias)
    assert whole._kernels is kernels
    values, scales = round_rows(weight)

    def compute(group: RankGroup) -> torch.Tensor:
        own = slice(384 // size * group.rank, 384 // size * (group.rank + 1))
        layer = make_shared_int8(values[:, own].contiguous(), scales, bias, 384, group, adds=True)
        assert isinstance(layer, SharedInt8Linear)
        assert layer._kernels is kernels
        return layer(x[:, own])

    for found in run_ranks(size, tmp_path, compute):
        assert torch.equal(found.nan_to_num(9e9), whole(x).nan_to_num(9e9))
        assert found.isnan().all(1).nonzero().flatten().tolist() == [5, 7]

"""Kernels keep NaN and infinities: those of this processor, and those of the matrix unit with a header in place of its
instructions. ``test_not_finite_levels.py`` has the kernels of the other levels."""

import shutil
from collections.abc import Iterator

import pytest
import torch

from tests.gpu_worker.kernels import not_finite
from tests.gpu_worker.kernels.emulation import build_emulated
from tests.gpu_worker.kernels.not_finite import DTYPES, LAYERS, VALUES
from tokenloom.gpu_worker.attention.cache import to_fp8
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.levels import processor_features
from tokenloom.gpu_worker.layers import panel_linear
from tokenloom.gpu_worker.layers import quantized_linear as int8_linear

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
values = pytest.mark.parametrize("value", VALUES)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module")
def matrix_unit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Layers are computed by emulated kernels of the matrix unit."""
    if not {"avx2", "fma"} <= processor_features():
        pytest.skip("no AVX2")
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", lambda source, *_: build_emulated(source, folder, header="matrix_unit.h"))
        int8, tiles = library.load_int8.__wrapped__(), library.load_bfloat16_tiles.__wrapped__()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_linear, "load_int8", lambda: int8)
        patch.setattr(panel_linear, "load_bfloat16_tiles", lambda: tiles)
        yield


@values
@dtypes
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_products(name: str, dtype: torch.dtype, value: float, num_rows: int) -> None:
    not_finite.check_product(name, dtype, value, num_rows)


@values
@pytest.mark.usefixtures("matrix_unit")
@pytest.mark.parametrize(
    ("name", "dtype"), [("int8", torch.float32), ("int8", torch.bfloat16), ("panels", torch.bfloat16)]
)
@pytest.mark.parametrize("num_rows", [1, 40])
def test_products_of_the_matrix_unit(name: str, dtype: torch.dtype, value: float, num_rows: int) -> None:
    not_finite.check_product(name, dtype, value, num_rows)


@values
@dtypes
def test_fused_operations(dtype: torch.dtype, value: float) -> None:
    not_finite.check_fused(dtype, value)


@pytest.mark.parametrize(("where", "value", "dtype", "rule"), not_finite.ATTENTION)
def test_attention(dtype: torch.dtype, value: float, where: str, rule: not_finite.Rule) -> None:
    not_finite.check_attention(dtype, value, None, where, rule)


@values
@dtypes
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_attention_over_8_bits(dtype: torch.dtype, value: float, where: str) -> None:
    not_finite.check_attention(dtype, value, torch.int8, where, not_finite.plain_rule)


@dtypes
def test_a_token_that_sees_only_an_infinite_score(dtype: torch.dtype) -> None:
    not_finite.check_lone_infinity(dtype)


@values
@dtypes
def test_adapters(dtype: torch.dtype, value: float) -> None:
    not_finite.check_lora(dtype, value)


@pytest.mark.parametrize("value", VALUES)
def test_rows_that_pytorch_rounds(value: float) -> None:
    x = torch.ones(3, 64)
    x[1, 5] = value
    numbers, units = int8_linear.round_rows(x)
    assert units.isfinite().tolist() == [True, False, True]
    assert units[1].isnan()
    assert (numbers[[0, 2]] == 127).all()


def test_keys_and_values_of_8_bit_floats() -> None:
    """The format has no infinity."""
    found = to_fp8(torch.tensor([*VALUES, 1e30, -1e30, 1.0])).float()
    assert found[:3].isnan().all()
    assert found[3:].tolist() == [448.0, -448.0, 1.0]

"""Products of few bfloat16 rows without the matrix unit, over panels as oneDNN packs them.

A processor with AVX-512 BF16 computes them with its instructions too, also if it has the matrix unit. On every
processor a header replaces the instructions.
"""

import shutil
from ctypes import CDLL

import pytest
import torch

from tests.gpu_worker.kernels.emulation import build_emulated
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.levels import processor_features

pytestmark = pytest.mark.skipif(
    not shutil.which("g++") or not {"avx2", "fma"} <= processor_features(), reason="no AVX2, or no compiler"
)


@pytest.fixture(params=["native", "emulated"], scope="module")
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    if request.param == "native":
        if "avx512_bf16" not in processor_features():
            pytest.skip("no AVX-512 BF16")
        return library.load_few_bf16_rows("cooperlake")
    path = build_emulated("few_bf16_rows", tmp_path_factory.mktemp("kernels"), "WITH_BF16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", lambda *_: path)
        return library.load_few_bf16_rows.__wrapped__()


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


def in_panels(weight: torch.Tensor, width: int) -> torch.Tensor:
    """Arrange [out, in] as [panels, pairs of inputs, outputs of a panel, 2]."""
    outputs, inputs = weight.shape
    return weight.view(outputs // width, width, inputs // 2, 2).transpose(1, 2).contiguous()


def multiply(
    kernels: CDLL,
    width: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    matrix, out = in_panels(weight, width), torch.empty(len(x), len(weight), dtype=dtype)
    getattr(kernels, f"multiply_{width}")(
        x.data_ptr(),
        matrix.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        len(x),
        weight.shape[1],
        len(weight),
        dtype == torch.float32,
        2,
    )
    return out


@pytest.mark.parametrize("width", [64, 32, 16])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 17, 32])
def test_products_are_exact_to_a_rounding(kernels: CDLL, width: int, rows: int) -> None:
    weight, bias, x = random(192, 336), random(192), random(rows, 336)  # the last chunk of inputs is shorter
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    found = multiply(kernels, width, x, weight, bias)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
    assert torch.equal(multiply(kernels, width, x, weight, bias, torch.float32), found.float())
    without = multiply(kernels, width, x, weight, None)
    torch.testing.assert_close(without.double(), exact - bias.double(), rtol=2**-8, atol=1e-4)


def test_a_row_depends_on_no_other(kernels: CDLL) -> None:
    weight, x = random(64, 1024), random(32, 1024)
    found = multiply(kernels, 64, x, weight, None)
    assert torch.equal(found, torch.cat([multiply(kernels, 64, row[None], weight, None) for row in x]))
    assert torch.equal(found[:13], multiply(kernels, 64, x[:13], weight, None))

"""Products of bfloat16 rows by the instruction for pairs of numbers.

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
        return library.load_bfloat16_dots("cooperlake")
    path = build_emulated("bfloat16_dots", tmp_path_factory.mktemp("kernels"), "WITH_BF16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", lambda *_: path)
        return library.load_bfloat16_dots.__wrapped__()


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).bfloat16()


def multiply(
    kernels: CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, threads: int = 2
) -> torch.Tensor:
    (outputs, inputs), panel = weight.shape, kernels.panel_outputs()
    matrix = torch.empty(-(-outputs // panel), inputs // 2, panel, 2, dtype=torch.bfloat16)
    kernels.pack(weight.data_ptr(), matrix.data_ptr(), outputs, inputs, threads)
    out = torch.empty(len(x), outputs, dtype=torch.bfloat16)
    bias_at = None if bias is None else bias.data_ptr()
    pointers = x.data_ptr(), matrix.data_ptr(), bias_at, out.data_ptr()
    kernels.multiply(*pointers, len(x), inputs, outputs, threads)
    return out


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 336), (1, 8), (130, 2), (65, 1090)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 17, 32])
def test_products_are_exact_to_a_rounding(kernels: CDLL, outputs: int, inputs: int, rows: int) -> None:
    weight, bias, x = random(outputs, inputs), random(outputs).float(), random(rows, inputs)
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    found = multiply(kernels, x, weight, bias)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
    without = multiply(kernels, x, weight, None)
    torch.testing.assert_close(without.double(), exact - bias.double(), rtol=2**-8, atol=1e-4)


def test_a_row_depends_on_no_other(kernels: CDLL) -> None:
    """Nor on how many threads there are, nor on where its stretch of rows begins."""
    weight, x = random(64, 1100), random(300, 1100)
    found = multiply(kernels, x, weight, None)
    assert torch.equal(found, torch.cat([multiply(kernels, row[None], weight, None, threads=1) for row in x]))
    assert torch.equal(found[:13], multiply(kernels, x[:13], weight, None))

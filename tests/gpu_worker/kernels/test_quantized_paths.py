"""The paths of quantized.cpp for AVX2, AVX-512 and both kinds of VNNI give the same bits; a header replaces them."""

from collections.abc import Iterator
from ctypes import CDLL

import pytest
import torch

from tests.gpu_worker.kernels.emulation import build_emulated
from tokenloom.gpu_worker.checkpoint.files import quantized_weight
from tokenloom.gpu_worker.checkpoint.files.quantized_weight import Float4Weight, QuantizedWeight, round_to_4_bits
from tokenloom.gpu_worker.kernels import library
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable
from tokenloom.gpu_worker.layers import quantized_linear
from tokenloom.gpu_worker.layers.quantized_linear import QuantizedLinear

MACROS = {"AVX-512": (), "AVX-512 VNNI": ("WITH_VNNI",), "AVX-VNNI": ("WITH_AVX_VNNI",)}


def avx2() -> CDLL | None:
    try:
        return library.load_quantized("haswell")
    except KernelsUnavailable:
        return None


pytestmark = pytest.mark.skipif(avx2() is None, reason="no AVX2, or no compiler")


@pytest.fixture(params=MACROS, scope="module")
def wider(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CDLL]:
    """The library of a path that the header stands in for."""
    path = build_emulated("quantized", tmp_path_factory.mktemp("kernels"), *MACROS[request.param])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "build", lambda *_: path)
        yield library.load_quantized.__wrapped__()


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(sum(size)))


def use(kernels: CDLL | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quantized_linear, quantized_weight):
        monkeypatch.setattr(module, "load_quantized", lambda march="native": kernels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_processor_computes_the_same_bits(
    wider: CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = torch.randint(-128, 128, (40, 128), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales, offsets, bias, x = random(40, 4), random(40, 4), random(40), random(131, 128).to(dtype)
    for some in (values, values // 16):
        for weight in (QuantizedWeight(some, scales, None, 32), QuantizedWeight(some, scales, offsets, 32)):
            found = []
            for kernels in (avx2(), wider):
                use(kernels, monkeypatch)
                found.append(QuantizedLinear(weight, bias)(x))
            assert torch.equal(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floats_of_4_bits_have_the_same_bits_too(
    wider: CDLL, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all numbers of a group are the largest: the header ends the process if 16 bits overflow."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (40, 64), generator=generator, dtype=torch.uint8)
    blocks[0], blocks[1] = 0x77, 0xFF
    exponents = torch.randint(120, 130, (40, 4), generator=generator, dtype=torch.uint8)
    weight, x, found = Float4Weight(blocks, exponents), random(131, 128).to(dtype), []
    x[0], x[1] = 1.0, -1.0
    for kernels in (avx2(), wider):
        use(kernels, monkeypatch)
        found.append(QuantizedLinear(weight, random(40))(x))
    assert torch.equal(*found)
    ends = QuantizedLinear(weight)(x)[:2]
    torch.testing.assert_close(ends, (x[:2].float() @ weight.dequantize().t()).to(dtype), rtol=1e-2, atol=1e-2)


def test_every_processor_rounds_to_the_same_bits(wider: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, found = random(64, 256), []
    for kernels in (avx2(), wider):
        use(kernels, monkeypatch)
        found.append(round_to_4_bits(weight, 64))
    assert (found[0].values != found[1].values).float().mean() < 0.01  # the order of sums decides near ties


def test_bytes_are_exact_at_their_ends(wider: CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header ends the process if 16 bits overflow."""
    x = torch.ones(3, 64)
    x[1] = -1
    for least, largest in ((-128, 127), (-8, 7)):
        for value in (least, largest):
            values = torch.full((16, 64), value, dtype=torch.int8)
            values[0, 0], values[0, 1] = least, largest
            for kernels in (avx2(), wider):
                use(kernels, monkeypatch)
                found = QuantizedLinear(QuantizedWeight(values, torch.ones(16, 2), None, 32))(x)
                expected = x @ values.float().t()
                torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

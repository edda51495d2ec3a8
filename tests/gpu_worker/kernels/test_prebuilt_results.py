"""Kernels that were built ahead for each level of this processor compute what PyTorch and the reference compute."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu_worker.attention.steps import BATCHES, BLOCK_SIZE, CPU, HEAD_SIZE, make_step, rules, run_rule, shape
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.attention.torch_backend import ReferenceBackend
from tokenloom.gpu_worker.kernels import build_ahead, library
from tokenloom.gpu_worker.kernels.levels import Level, available_levels
from tokenloom.gpu_worker.kernels.prebuilt import find_prebuilt
from tokenloom.gpu_worker.ops.cpu_ops import CPUOps
from tokenloom.gpu_worker.ops.torch_ops import TorchOps

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

VARIANTS = [
    ("fused", {}),
    ("attention", {"HEAD_SIZE": HEAD_SIZE}),
    ("attention", {"HEAD_SIZE": HEAD_SIZE, "SOFTCAP": 1}),
]


@pytest.fixture(scope="module", params=available_levels(), ids=lambda level: level.name)
def level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Level]:
    """A level whose libraries take the place of all others."""
    folder, level = tmp_path_factory.mktemp("prebuilt"), request.param
    compiler = build_ahead.compiler_for(level)
    assert compiler is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_ahead, "variants", lambda: iter(VARIANTS))
        build_ahead.build_ahead(level, compiler, folder)

        def build(source: str, march: str, cache_dir: Path | None = None, **macros: int) -> Path:
            found = find_prebuilt(source, macros, [level], folder)
            assert found is not None
            return found

        patch.setattr(library, "build", build)
        for name in ("load_attention", "load_fused"):
            fresh = functools.cache(getattr(library, name).__wrapped__)
            patch.setattr(library, name, fresh)
            patch.setattr(f"tokenloom.gpu_worker.{_user(name)}", fresh)
        yield level


def _user(name: str) -> str:
    return {"load_attention": "attention.cpu_backend", "load_fused": "ops.cpu_ops"}[name] + f".{name}"


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_operations(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    residual, delta, gate_up = (torch.randn(7, 256, generator=generator).to(dtype) for _ in range(3))
    weight = torch.randn(256, generator=generator).to(dtype)
    results = [
        (ops.add_norm(residual.clone(), delta, weight, 1e-5, 0.0), ops.gate(gate_up, "silu"))
        for ops in (TorchOps(), CPUOps())
    ]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=5e-2)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(batch: str, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 1e-5, "atol": 2e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for config, rule in ((shape(2, dtype), rules(4, None)["both"]), (shape(1, dtype, 6), rules(6, 40)["both"])):
        step = make_step(*BATCHES[batch], config.num_heads, config)
        expected, _ = run_rule(ReferenceBackend(config, BLOCK_SIZE, CPU), step, rule)
        found, _ = run_rule(CPUBackend(config, BLOCK_SIZE, CPU), step, rule)
        torch.testing.assert_close(found, expected, **tolerance)

"""Backends by name, and what takes the place of kernels that cannot be had."""

import logging
import shutil
from types import SimpleNamespace

import pytest
import torch

from tests.gpu_worker.attention.steps import CPU, shape
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.gpu_worker.attention import cpu_backend
from tokenloom.gpu_worker.attention.attention_backends import WorkerBackends, make_attention_backend
from tokenloom.gpu_worker.checkpoint import local_config
from tokenloom.gpu_worker.kernels.compiler import KernelsUnavailable

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("torch", "torch"),
        ("reference", "reference"),
        pytest.param("cpu", "cpu", marks=needs_compiler),
        pytest.param("auto", "cpu", marks=needs_compiler),
    ],
)
def test_by_name(name: str, found: str) -> None:
    assert make_attention_backend(name, shape(2), 16, CPU).name == found


def test_auto_beside_a_cpu() -> None:
    assert make_attention_backend("auto", shape(2), 16, torch.device("meta")).name == "torch"
    with pytest.raises(ValueError, match="triton runs on a GPU where triton is installed, not on meta"):
        make_attention_backend("triton", shape(2), 16, torch.device("meta"))
    with pytest.raises(ValueError, match="cpu does not run on meta"):
        make_attention_backend("cpu", shape(2), 16, torch.device("meta"))


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_torch_takes_the_place_of_missing_kernels_with_one_warning(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(head_size: int, march: str, int8: bool) -> None:
        raise KernelsUnavailable("there is no C++ compiler (g++)")

    monkeypatch.setattr(cpu_backend, "load_attention", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert make_attention_backend(name, shape(2), 16, CPU).name == "torch"
    (record,) = caplog.records
    assert "no C++ compiler" in record.getMessage()


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype", "found"),
    [
        ("auto", torch.bfloat16, "cpu-tokenwise"),
        ("cpu", torch.bfloat16, "cpu"),
        ("auto", torch.float32, "cpu"),
    ],
)
def test_beside_states_each_token_has_an_order_of_its_own(name: str, dtype: torch.dtype, found: str) -> None:
    config = shape(2, dtype)
    config.states = object()
    backend = make_attention_backend(name, config, 16, CPU)
    assert backend.name == found
    assert isinstance(backend, cpu_backend.TokenwiseBackend) == (found == "cpu-tokenwise")


def test_unknown() -> None:
    with pytest.raises(
        ValueError, match="must be one of auto, cpu, torch, triton, flashinfer, flash-attn, reference, not"
    ):
        make_attention_backend("flash", shape(2), 16, CPU)


@pytest.mark.parametrize("name", ["flashinfer", "flash-attn"])
def test_libraries_compute_on_gpus(name: str) -> None:
    with pytest.raises(ValueError, match=f"attention_backend {name} runs on a GPU where triton is installed, not on"):
        make_attention_backend(name, shape(2), 16, CPU)


def test_numerics_name_the_version_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines with other versions of it may compute other logits."""
    versions = {"flashinfer-python": "0.6.13", "flash-attn-4": "4.0.0b36"}
    monkeypatch.setattr(local_config, "version", versions.__getitem__)
    backends = WorkerBackends(EngineConfig(), CPU)
    titles = [backends.title(SimpleNamespace(name=name)) for name in ("flashinfer", "flash-attn", "cpu")]
    assert titles == ["flashinfer-0.6.13", "flash-attn-4.0.0b36", "cpu"]

"""The benchmark of gpt-oss's experts computes layers of both kinds, and writes models that load."""

from pathlib import Path

import pytest
import torch

from tests.gpu_worker.layers.test_quantized_linear import needs_kernel
from tokenloom.bench.engine.quantization import mxfp4_experts
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config


@needs_kernel
def test_both_kinds_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(mxfp4_experts, "HIDDEN", 64)
    monkeypatch.setattr(mxfp4_experts, "INNER", 96)
    monkeypatch.setattr(mxfp4_experts, "bandwidth", lambda: 1e9)
    mxfp4_experts.main(["--rows", "1", "4", "--experts", "6", "--layers", "1", "--rounds", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[1:]] == ["1 rows", "4 rows"]
    assert "reading experts at" in lines[1]


@pytest.mark.parametrize("packed", [True, False])
def test_its_models_are_gpt_oss(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4_experts, "HIDDEN", 64)
    monkeypatch.setattr(mxfp4_experts, "INNER", 96)
    monkeypatch.setattr(mxfp4_experts, "VOCABULARY", 32)
    torch.manual_seed(0)
    path = mxfp4_experts.write_model(tmp_path / "model", 2, 4, packed=packed)
    config = load_model_config(path)
    assert config.family == "gpt_oss"
    assert (config.scheme is not None) == packed

"""The context length that the user asked for, and the tokenizer of a GGUF file, before a process starts."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tests.gpu_worker.checkpoint.gguf.files import write_demo
from tests.gpu_worker.checkpoint.quantization import formats
from tests.gpu_worker.checkpoint.quantization.test_schemes import FORMATS
from tests.tokenloom.preflight.odd_checkpoints import CONFIG, good
from tokenloom.cli.main import app
from tokenloom.engine_core.data.config import CacheConfig, EngineConfig, ParallelConfig, WorkerConfig
from tokenloom.model_files.model_path import DEMO_MODEL
from tokenloom.preflight import model
from tokenloom.preflight.model import answer, check_checkpoint
from tokenloom.preflight.small_files import CannotServe
from tokenloom.services.engine.records import engine_settings


def check(path: Path, max_model_len: int | None, **config: Any) -> None:
    checkpoint = good(path / "model")
    (checkpoint / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 128} | config))
    check_checkpoint(checkpoint, EngineConfig(max_model_len=max_model_len))


def test_serve_refuses_more_than_the_context_of_the_model() -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--max-model-len", "2049"])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "max_model_len 2049: the model's context has 2048 tokens" in line


@pytest.mark.parametrize(
    ("drafts", "reason"),
    [
        ({"method": "draft_model", "model": "/nowhere"}, "speculative_config: model '/nowhere': no such directory"),
        ({"method": "eagle", "model": "draft"}, "the head has 2 layers of size 64; it needs one of the model's size"),
        ({"method": "mtp"}, "speculative_config: the method mtp is for"),
    ],
)
def test_serve_refuses_what_cannot_draft_for_the_model(drafts: dict[str, str], reason: str) -> None:
    """``draft`` is a folder of the demo model."""
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--speculative-config", json.dumps(drafts)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert reason in line


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 128),
        ({"rope_scaling": None}, 128),
        ({"rope_scaling": {"rope_type": "default"}}, 128),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, 128),
        ({"rope_scaling": YARN}, 512),
        ({"rope_parameters": YARN}, 512),
    ],
)
def test_the_context_is_that_of_the_engine(tmp_path: Path, config: dict[str, Any], length: int) -> None:
    check(tmp_path, length, **config)
    with pytest.raises(CannotServe, match=f"context has {length} tokens: give at most that"):
        check(tmp_path / "more", length + 1, **config)


@pytest.mark.parametrize("length", [1, 0, -1])
def test_less_than_two_tokens_are_refused(tmp_path: Path, length: int) -> None:
    with pytest.raises(CannotServe, match="at least 2"):
        check(tmp_path, length)


def test_nothing_asked_for_passes(tmp_path: Path) -> None:
    check(tmp_path, None)


@pytest.mark.parametrize(
    ("model", "split", "message"),
    [
        ("rwkv", "", "tokenizer.ggml.model 'rwkv' is not supported"),
        ("gpt2", "viking", "tokenizer.ggml.pre 'viking' is"),
    ],
)
def test_a_tokenizer_that_is_not_read_is_named_before_a_start(
    model: str, split: str, message: str, tmp_path: Path
) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(split)
        writer.add_token_list(["a"])

    write_demo(tmp_path / "demo.gguf", Kind.Q8_0, add)
    with pytest.raises(CannotServe, match=re.escape(message)):
        check_checkpoint(tmp_path / "demo.gguf")


@pytest.mark.parametrize("option", ["data_parallel_backend", "distributed_executor_backend"])
def test_workers_on_ray_may_have_gpus_that_this_machine_has_not(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_settings, "may_have_gpu", lambda: False)
    worker = WorkerConfig(device="cuda", quantization="fp8")
    assert (
        answer(DEMO_MODEL, EngineConfig(worker=worker, parallel=replace(ParallelConfig(), **{option: "ray"}))).by
        == "built in"
    )
    with pytest.raises(CannotServe, match="finds no GPU on this machine"):
        answer(DEMO_MODEL, EngineConfig(worker=worker))
    on_cpus = EngineConfig(worker=replace(worker, device="cpu"), parallel=replace(ParallelConfig(), **{option: "ray"}))
    with pytest.raises(CannotServe, match="on a GPU only"):
        answer(DEMO_MODEL, on_cpus)


WRONG = {
    "zero": torch.tensor(0.0, dtype=torch.bfloat16),
    "negative": torch.tensor([-1.0], dtype=torch.float16),
    "not a number": torch.tensor(float("nan")),
    "infinite": torch.tensor(float("inf"), dtype=torch.bfloat16),
    "beyond float32": torch.tensor(1e300, dtype=torch.float64),
    "several": torch.ones(2),
    "none": torch.ones(0),
}
RIGHT = {str(dtype): torch.tensor([0.25], dtype=dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16)}


@pytest.mark.parametrize("name", [*WRONG, *RIGHT])
@pytest.mark.parametrize("part", ["v_scale", "k_proj.output_scale", "kv_scale"])
def test_numbers_that_cannot_divide_keys_or_values_are_named_before_a_start(
    part: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "may_find_gpu", lambda options: True)
    path, _ = formats.write(tmp_path, *FORMATS["fp8, by tensor"])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (path / file).write_bytes((DEMO_MODEL / file).read_bytes())
    stored, number = f"model.layers.1.self_attn.{part}", {**WRONG, **RIGHT}[name]
    save_file(load_file(path / "model.safetensors") | {stored: number}, path / "model.safetensors")
    check_checkpoint(path, EngineConfig())  # which does not read them
    options = EngineConfig(cache=CacheConfig(dtype="fp8"))
    if name in RIGHT:
        check_checkpoint(path, options)
        return
    wanted = f"model.safetensors: {stored} must be one positive number of a float32, by which keys or values"
    with pytest.raises(CannotServe, match=re.escape(wanted)):
        check_checkpoint(path, options)

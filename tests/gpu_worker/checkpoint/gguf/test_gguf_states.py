"""GGUF files of models of which some layers keep a state: the logits of the model that was converted."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.state_models import (
    ARCHITECTURES,
    ENTRIES,
    FACTORS,
    Pieces,
    convert_kimi,
    convert_qwen3_next,
    write,
)
from tests.gpu_worker.models.transformers.test_states import Driver, draw
from tests.parity.state_checkpoints import SERVED, make_model
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.gguf.config import gguf_config
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.model_config import Multipliers
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.decoder import DecoderModel
from tokenloom.gpu_worker.models.load_model import load_model
from tokenloom.gpu_worker.models.mixers import weight_scales


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_model(
    architecture: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As large as a block: one that lay in two heads would be rounded otherwise in the file's order.
    monkeypatch.setitem(SERVED["qwen3_5_text"], "linear_value_head_dim", 32)
    entries = ENTRIES.get(architecture, {})
    if architecture == "qwen35moe":
        entries = entries | {"linear_value_head_dim": 32}
    model = make_model(ARCHITECTURES[architecture][0], **entries)
    for name, bias in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(3)))
    check(architecture, model, kind, tmp_path)


@pytest.mark.parametrize("positions", ["nope", "rope"])
def test_a_granite_without_experts_has_its_mlp_in_two_parts(positions: str, tmp_path: Path) -> None:
    entries = {"num_local_experts": 0, "position_embedding_type": positions, "intermediate_size": 64}
    model = make_model("granitemoehybrid", **entries, **FACTORS, shared_intermediate_size=64)
    check("granitehybrid", model, Kind.F32, tmp_path)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_falcon_with_norms_gates_before_them(groups: int, tmp_path: Path) -> None:
    entries = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": groups}
    check("falcon-h1", make_model("falcon_h1", **ENTRIES["falcon-h1"], **entries), Kind.F32, tmp_path)


def test_factors_in_the_matrices_leave_blocks_packed(tmp_path: Path) -> None:
    model = make_model("falcon_h1", **ENTRIES["falcon-h1"])
    config = load_model_config(write(tmp_path / "model.gguf", "falcon-h1", model, Kind.Q8_0))
    assert config.multipliers is not None
    assert weight_scales(config) == {}
    assert config.embedding_scale == config.logit_scale == 1.0
    assert weight_scales(replace(config, multipliers=Multipliers(key=2.0))).keys() == {
        "self_attn.k_proj.weight",
        "self_attn.k_proj.bias",
    }


def test_a_kimi_of_older_converters_has_keys_and_values_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ARCHITECTURES["kimi-linear"]

    def convert(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
        if name.endswith(("conv1d.weight", "A_log")):  # llama.cpp drops the first dimensions, of 1, as it quantizes
            last = -2 if "A_log" in name else -3
            return {each: part.flatten(0, last) for each, part in convert_kimi(name, tensor, config).items()}
        return {name: tensor} if "kv_b" in name else convert_kimi(name, tensor, config)

    monkeypatch.setitem(ARCHITECTURES, "kimi-linear", (*own[:3], convert))
    check("kimi-linear", make_model("kimi_linear"), Kind.F32, tmp_path)


@pytest.mark.parametrize(
    ("architecture", "entry", "value", "message"),
    [
        ("mamba2", "attention.head_count", 4, "must be 0: no layer attends"),
        ("nemotron_h", "feed_forward_length", 96, "must say of each layer how large its MLP is"),
        ("nemotron_h", "feed_forward_length", [0, 96, 96, 0], "a layer has one part"),
        ("falcon-h1", "ssm.inner_size", 100, "must be a multiple of 1 and of 8"),
        ("falcon-h1", "mlp_gate_multiplier", 0.5, "not supported: falcon-h1.mlp_gate_multiplier"),
        ("kimi-linear", "expert_gating_func", 1, "must be 2, which is sigmoid"),
        ("kimi-linear", "expert_count", 0, "must be above 0"),
    ],
)
def test_entries_that_contradict_a_file_are_refused_by_name(
    architecture: str, entry: str, value: Any, message: str, tmp_path: Path
) -> None:
    model = make_model(ARCHITECTURES[architecture][0])
    path = write(tmp_path / "model.gguf", architecture, model, Kind.F32, {f"{architecture}.{entry}": value})
    with pytest.raises(ValueError, match=message) as caught:
        gguf_config(path)
    assert f"{architecture}.{entry}" in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("expert_group_count", 3, "n_group must divide 4 experts"),
        ("expert_group_used_count", 2, "topk_group must be at most n_group, 1"),
    ],
)
def test_groups_that_the_experts_do_not_form_are_refused(entry: str, value: int, message: str, tmp_path: Path) -> None:
    model = make_model("kimi_linear")
    path = write(tmp_path / "model.gguf", "kimi-linear", model, Kind.F32, {f"kimi-linear.{entry}": value})
    with pytest.raises(ValueError, match=message):
        load_model_config(path)


@pytest.mark.parametrize("architecture", ["falcon-h1", "mamba2"])
def test_a_file_with_more_layers_than_it_says_is_refused(architecture: str, tmp_path: Path) -> None:
    model = make_model(ARCHITECTURES[architecture][0], **ENTRIES.get(architecture, {}))
    count = model.config.num_hidden_layers - 1
    path = write(tmp_path / "model.gguf", architecture, model, Kind.F32, {f"{architecture}.block_count": count})
    with pytest.raises(ValueError, match=rf"holds tensors of an unsupported feature: \S+\.{count}\."):
        load_model(path, "float32")


def test_an_older_qwen3_next_has_its_projections_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = ARCHITECTURES["qwen3next"]

    def convert(name: str, tensor: torch.Tensor, config: Any) -> Pieces:
        return {name: tensor} if "qkvz" in name else convert_qwen3_next(name, tensor, config)

    monkeypatch.setitem(ARCHITECTURES, "qwen3next", (*own[:3], convert))
    check("qwen3next", make_model("qwen3_next"), Kind.F32, tmp_path)


def check(architecture: str, model: Any, kind: Kind, directory: Path) -> None:
    """Compare the logits of a file with those of the model, and of its checkpoint."""
    path = write(directory / "model.gguf", architecture, model, kind)
    assert served_how(EngineConfig(worker=WorkerConfig(model=str(path))), has_gpu=False).by == "built in"
    tokens = draw(60, seed=1)
    found = logits_of(path, tokens)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    if kind is Kind.F32:
        model.save_pretrained(directory / "checkpoint")
        torch.testing.assert_close(found, logits_of(directory / "checkpoint", tokens), rtol=1e-4, atol=1e-4)


def logits_of(path: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        loaded = load_model(path, "float32")
    assert isinstance(loaded, DecoderModel)
    driver = Driver(loaded)
    row = driver.begin(tokens)
    driver.step((row, [(41, 0)]))
    driver.step((row, [(19, 0)]))
    return torch.cat(row.logits)

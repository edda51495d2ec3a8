"""Architectures of GGUF: the logits of a file are those of the model of transformers from which it was converted."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.gpu_worker.checkpoint.gguf.architectures import MODELS, make, write_model
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gguf.gguf_file import read_gguf
from tokenloom.gpu_worker.checkpoint.gguf.blocks import BLOCK_TYPES
from tokenloom.gpu_worker.checkpoint.gguf.config import read_model
from tokenloom.gpu_worker.checkpoint.gguf.names import TensorPlace, places
from tokenloom.gpu_worker.checkpoint.gguf.source import KeysAndValues, PackedBlocks
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model

RunModel = Callable[..., list[Tensor]]

PROMPT = torch.arange(100, 148)


@torch.inference_mode()
def differences(path: Path, model: Any, run_model: RunModel) -> float:
    """Return by how much the logits of a file differ at most from a model's, for which the largest are about one."""
    expected = model(PROMPT[None]).logits[0].float()
    (found,) = run_model(load_model(path, "float32"), [PROMPT], [[len(PROMPT) - 5], [3], [1], [1]])
    assert expected.std() > 0.05
    return float((found - expected).abs().max() / expected.std())


def how(path: Path) -> str:
    return served_how(EngineConfig(worker=WorkerConfig(model=str(path))), has_gpu=False).by


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_model(name: str, tmp_path: Path, run_model: RunModel) -> None:
    architecture, model_type, entries, by = MODELS[name]
    with torch.inference_mode():
        model = make(model_type, **entries)
        path = write_model(tmp_path / "model.gguf", architecture, model)
    assert how(path) == by
    assert differences(path, model, run_model) <= 2e-3
    ModelLoader().check(path)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "phi3"])
def test_written_files_load_in_transformers(name: str, tmp_path: Path) -> None:
    """The writer of the tests and the reader of the product could share an error; transformers has a reader, too."""
    architecture, model_type, entries, _ = MODELS[name]
    model = make(model_type, **entries)
    write_model(tmp_path / "model.gguf", architecture, model)
    found = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=model)["tensors"]
    expected = model.state_dict()
    assert found.keys() | {"lm_head.weight"} == expected.keys()
    assert all(torch.allclose(found[each], expected[each], atol=1e-6) for each in found)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt-oss", Kind.MXFP4),
        ("granite", Kind.Q8_0),
        ("glm4", Kind.Q4_0),
        ("deepseek v3", Kind.Q8_0),
        ("gemma4, experts", Kind.Q8_0),
    ],
)
def test_quantized_files_have_the_logits_of_their_numbers(
    name: str, kind: Kind, tmp_path: Path, run_model: RunModel
) -> None:
    architecture, model_type, entries, _ = MODELS[name]
    with torch.inference_mode():
        model = make(model_type, **entries)
        path = write_model(tmp_path / "model.gguf", architecture, model, kind)
    assert differences(path, model, run_model) <= 2e-3


@pytest.mark.parametrize("dtype", [Kind.F32, Kind.F16, Kind.Q8_0], ids=lambda kind: kind.name)
def test_parts_of_heads_are_one_matrix(dtype: Kind) -> None:
    heads, inputs, keys, values = 3, 64, 32, 40
    numbers = torch.randn(heads, keys + values, inputs, generator=torch.Generator().manual_seed(0))
    split = numbers.split([keys, values], 1)
    stored = [part.contiguous().numpy() for part in (split[0].transpose(1, 2), split[1])]
    data = [gguf.quants.quantize(each, dtype) for each in stored]
    again = [torch.from_numpy(gguf.quants.dequantize(each, dtype)) for each in data]
    expected = torch.cat((again[0].transpose(1, 2), again[1]), 1).flatten(0, 1)
    if dtype is Kind.Q8_0:
        parts = [PackedBlocks(torch.from_numpy(each).flatten(0, 1), BLOCK_TYPES[dtype.value], None) for each in data]
    else:
        parts = [torch.from_numpy(each) for each in data]
    weight = KeysAndValues(*parts, heads, keys, values, inputs)
    assert weight.shape == expected.shape == (216, 64)
    assert torch.equal(weight.rows(0, 216), expected)
    assert torch.equal(weight.rows(64, 192), expected[64:192])


def entries_of(path: Path) -> dict[str, Any]:
    return read_model(path)[1]


def write_head(path: Path, architecture: str, embeddings: tuple[int, int], entries: dict[str, Any]) -> Path:
    """Write a file of the size of a published one, whose embeddings are zeros and whose layers are absent."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in entries.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint64
        (writer.add_string if isinstance(value, str) else add)(f"{architecture}.{name}", value)
    writer.add_tensor_info("token_embd.weight", embeddings, np.dtype(np.float16), 0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + 2 * math.prod(embeddings))  # of zeros, which take no room
    return path


COMMON = {"context_length": 8192, "feed_forward_length": 64, "attention.layer_norm_rms_epsilon": 1e-6}


@pytest.mark.parametrize(("architecture", "layers", "expected"), [
    ("gemma2", 42, 256), ("gemma2", 46, 144), ("gemma3", 48, 256), ("gemma3", 62, 144),
])  # fmt: skip
def test_the_largest_gemmas_have_another_scale(architecture: str, layers: int, expected: int, tmp_path: Path) -> None:
    """As gemma-2-27b's and gemma-3-27b's ``query_pre_attn_scalar``, which is hidden_size / num_attention_heads."""
    sizes = {"block_count": layers, "embedding_length": 4608, "attention.head_count": 32, "attention.key_length": 256}
    path = write_head(
        tmp_path / "model.gguf", architecture, (8, 4608), COMMON | sizes | {"attention.value_length": 256}
    )
    assert entries_of(path)["query_pre_attn_scalar"] == expected


DEEPSEEK = COMMON | {
    "block_count": 61, "embedding_length": 7168, "attention.head_count": 128, "attention.head_count_kv": 128,
    "attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512, "attention.key_length": 192,
    "attention.value_length": 128, "rope.dimension_count": 64, "expert_count": 256, "expert_used_count": 8,
    "expert_shared_count": 1, "expert_feed_forward_length": 2048, "expert_weights_scale": 2.5,
    "leading_dense_block_count": 3, "expert_gating_func": 2, "rope.scaling.type": "yarn", "rope.scaling.factor": 40.0,
    "rope.scaling.original_context_length": 4096, "rope.scaling.yarn_log_multiplier": 0.1,
}  # fmt: skip
"""The entries of older files of DeepSeek-R1: keys and values in one matrix, and no groups of experts."""


def test_older_files_of_deepseek(tmp_path: Path) -> None:
    entries = entries_of(write_head(tmp_path / "model.gguf", "deepseek2", (8, 7168), DEEPSEEK))
    expected = {
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 512, "n_group": 8,
        "topk_group": 4, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    }  # fmt: skip
    assert expected.items() <= entries.items()
    assert entries["rope_parameters"]["mscale"] == entries["rope_parameters"]["mscale_all_dim"] == 1.0
    softmax = DEEPSEEK | {"expert_gating_func": 1, "expert_count": 160, "expert_group_count": 8}
    entries = entries_of(write_head(tmp_path / "v2.gguf", "deepseek2", (8, 7168), softmax))
    assert (entries["architectures"], entries["topk_method"]) == (["DeepseekV2ForCausalLM"], "group_limited_greedy")


def test_one_matrix_of_keys_and_values_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "deepseek2")
    for name in ("attn_kv_b", "attn_k_b", "attn_v_b"):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((2, 2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = places(read_gguf(tmp_path / "model.gguf"))
    assert found == {"model.layers.0.self_attn.kv_b_proj.weight": TensorPlace("blk.0.attn_kv_b.weight")}


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another gate": ("deepseek2", DEEPSEEK | {"expert_gating_func": 3}, "expert_gating_func must be 1 or 2"),
    "no experts": ("gpt-oss", COMMON | {"expert_count": 0}, "expert_count must be above 0"),
    "windows of OLMo 3": ("olmo2", COMMON | {"attention.sliding_window": 4096}, "not supported: olmo2.attention.slid"),
    "many experts": ("gpt-oss", COMMON | {"expert_count": 1 << 40}, "expert_count is 1099511627776, and no tensor has"),
    "a large state": ("mamba2", COMMON | {"ssm.inner_size": 1 << 40}, "ssm.inner_size is 1099511627776, and no tensor"),
    "a large head": ("qwen3", COMMON | {"attention.key_length": 1 << 40}, "key_length is 1099511627776, and no tensor"),
    "another part of a head": ("granite", COMMON | {"rope.dimension_count": 8}, "must be the size of a head, 16"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    architecture, entries, message = REFUSED[name]
    sizes = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4}
    path = write_head(tmp_path / "model.gguf", architecture, (8, 1 << 16), sizes | entries)
    with pytest.raises(ValueError, match=message):
        how(path)


@pytest.mark.parametrize(
    ("architecture", "part"), [("phi3", "attn_q"), ("glm4", "ffn_gate"), ("gemma4", "ffn_gate_exps")]
)
def test_matrices_in_parts_are_named_before_a_start(architecture: str, part: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    for name in ("token_embd.weight", f"blk.0.{part}.weight"):
        writer.add_tensor(name, np.zeros((8, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=rf"blk\.0\.{part}\.weight is a part of a matrix that is read as one"):
        how(tmp_path / "model.gguf")


def test_modules_are_not_asked_for_built_in_architectures(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "olmo2", make("olmo2"))
    with pytest.raises(ValueError, match="transformers' modules read no GGUF file of Olmo2ForCausalLM"):
        load_model(path, model_impl="transformers")

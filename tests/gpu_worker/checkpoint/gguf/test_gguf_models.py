"""Models in GGUF files give the logits of the weights that the files stand for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.gpu_worker.checkpoint.gguf.files import write, write_demo
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.weights import file_stamps
from tokenloom.gpu_worker.models.load_model import ModelLoader, load_model
from tokenloom.model_files.model_path import DEMO_MODEL

RunModel = Callable[..., list[Tensor]]
SaveCheckpoint = Callable[..., Path]

PROMPT = torch.arange(100, 148)
QUANTIZED = [
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K,
    Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4,
]  # fmt: skip


@pytest.fixture
def logits(run_model: RunModel) -> Callable[[Path], Tensor]:
    """Return a model's logits of the prompt, computed in float32."""

    def compute(path: Path) -> Tensor:
        with torch.inference_mode():
            return run_model(load_model(path, "float32"), [PROMPT], [[len(PROMPT)]])[0]

    return compute


def save_plain(directory: Path, config: Path, values: dict[str, np.ndarray]) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text((config / "config.json").read_text())
    save_file({name: torch.from_numpy(value) for name, value in values.items()}, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("kind", [*QUANTIZED, Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_logits_are_those_of_the_dequantized_weights(kind: Kind, tmp_path: Path, logits) -> None:
    path = tmp_path / "demo.gguf"
    plain = save_plain(tmp_path / "plain", DEMO_MODEL, write_demo(path, kind))
    assert (logits(path) - logits(plain)).abs().max() <= 1e-4
    ModelLoader().check(path)  # reads no tensors' content


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 128}


def add_llama3(writer: gguf.GGUFWriter) -> None:
    """The factors that llama.cpp's converter computes from a Llama 3.1's configuration."""
    factors = []
    for frequency in 1 / 10_000.0 ** (np.arange(0, 16, 2) / 16):
        wavelength = 2 * np.pi / frequency
        smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        factors.append(1 / ((1 - smooth) / 8 + smooth))
    writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))


def add_linear(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(4.0)


def add_yarn(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


MODELS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama, whose heads are stored in pairs": ("llama", {}, None),
    "llama, tied, llama3 rope": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}, add_llama3),
    "llama, linear rope": ("llama", {"rope_parameters": LINEAR}, add_linear),
    "qwen2, biases": ("qwen2", {}, None),
    "qwen3, yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}, add_yarn),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_equal_their_safetensors(name: str, tmp_path: Path, save_checkpoint: SaveCheckpoint, logits) -> None:
    architecture, entries, change = MODELS[name]
    plain = save_checkpoint(architecture, **entries)
    config = {
        "max_position_embeddings": 512, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    write(
        tmp_path / "model.gguf", architecture, config | entries, load_file(plain / "model.safetensors"), change=change
    )
    assert (logits(tmp_path / "model.gguf") - logits(plain)).abs().max() <= 1e-4


def test_a_model_in_several_files_is_that_in_one(tmp_path: Path, logits) -> None:
    whole, first = tmp_path / "demo.gguf", tmp_path / "parts-00001-of-00005.gguf"
    write_demo(whole, Kind.Q8_0)
    write_demo(tmp_path / "parts.gguf", Kind.Q8_0, tensors_in_a_file=10)
    parts = sorted(tmp_path.glob("parts-*"))
    assert [part.name for part in parts] == [f"parts-0000{n}-of-00005.gguf" for n in range(1, 6)]
    expected = logits(whole)
    assert torch.equal(logits(first), expected)
    assert torch.equal(logits(parts[1]), expected)  # the first has the metadata of all
    before = file_stamps(first)
    parts[2].touch()
    assert file_stamps(first) != before
    parts[2].write_bytes(parts[2].read_bytes()[:-4096])
    with pytest.raises(ValueError, match=r"parts-00003-of-00005\.gguf ends within the tensor"):
        load_model(first)


def test_dtype_is_that_of_the_matrices(tmp_path: Path) -> None:
    for kind, dtype in ((Kind.F32, torch.float32), (Kind.BF16, torch.bfloat16), (Kind.Q4_0, torch.bfloat16)):
        write_demo(tmp_path / "demo.gguf", kind)
        assert load_model_config(tmp_path / "demo.gguf").dtype == dtype


def test_stamps_change_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo(path, Kind.Q8_0)
    before = file_stamps(path)
    assert file_stamps(path) == before
    path.touch()
    assert file_stamps(path) != before


CHANGES: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "an unknown entry": (
        lambda writer: writer.add_float32("qwen3.logit_scale", 2.0),
        r"demo\.gguf: not supported: qwen3\.logit_scale = 2\.0",
    ),
    "experts": (lambda writer: writer.add_expert_count(8), r"qwen3\.expert_count must be 0"),
    "another rope": (
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        r"qwen3\.rope\.scaling\.type must be none, linear or yarn",
    ),
    "partly rotated heads": (
        lambda writer: writer.add_rope_dimension_count(32),
        r"qwen3\.rope\.dimension_count must be the size of a head, 64",
    ),
    "an unknown tensor": (
        lambda writer: writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)),
        r"unsupported feature: blk\.0\.attn_sinks\.weight",
    ),
    "another type": (
        lambda writer: writer.add_tensor("blk.9.ffn_up.weight", np.zeros((4, 66), np.uint8), raw_dtype=Kind.IQ2_XXS),
        r"blk\.9\.ffn_up\.weight has the type IQ2_XXS, which is not supported",
    ),
    "factors of another rope": (
        lambda writer: writer.add_tensor("rope_freqs.weight", np.arange(1, 33, dtype=np.float32)),
        r"rope_freqs\.weight holds other factors than those of Llama 3",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_not_supported_is_named(name: str, tmp_path: Path) -> None:
    change, message = CHANGES[name]
    write_demo(tmp_path / "demo.gguf", Kind.Q8_0, change)
    with pytest.raises(ValueError, match=message):
        ModelLoader().check(tmp_path / "demo.gguf")


@pytest.mark.parametrize(("kind", "size"), [(Kind.IQ2_XXS, 66), (Kind.IQ3_S, 110), (Kind.TQ2_0, 66)])
def test_a_type_of_blocks_that_is_not_supported_is_named(tmp_path: Path, kind: Kind, size: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    for name, value in {"embedding_length": 256, "attention.head_count": 4, "block_count": 1}.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_feed_forward_length(64)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", np.zeros((4, size), np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        ValueError, match=rf"token_embd\.weight has the type {kind.name}, which is not supported: must be of F32"
    ):
        load_model(tmp_path / "model.gguf")


@pytest.mark.parametrize("architecture", ["mamba", "nemotron_h_moe", "falcon", "gemma3n"])
def test_another_architecture_is_named(tmp_path: Path, architecture: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"model\.gguf: general\.architecture '\w+' is not supported: must be one of"):
        load_model_config(tmp_path / "model.gguf")


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    write_demo(path, Kind.Q8_0)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ValueError, match=r"demo\.gguf ends within the tensor"):
        load_model(path)

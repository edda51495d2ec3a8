"""GGUF files of models of which some layers keep a state: the logits of the model that was converted.

Entries, shapes and orders are those of ``conversion/lfm2.py`` and ``conversion/qwen.py`` in ggml-org/llama.cpp.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import encode
from tests.gpu_worker.models.transformers.test_states import Driver, draw
from tests.parity.state_checkpoints import SERVED, make_model
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.models.decoder import DecoderModel


def describe_lfm2(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
    writer.add_head_count_kv([0 if each == "conv" else config.num_key_value_heads for each in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def describe_qwen35(writer: gguf.GGUFWriter, model: Any) -> None:
    config = model.config
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * 0.25))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_full_attention_interval(4)
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)


def convert_qwen35(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Return a tensor as the file holds it."""
    groups, heads, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    keys = 2 * groups * config.linear_key_head_dim

    def tiled(part: torch.Tensor, dim: int, head: int) -> torch.Tensor:
        by_head = part.unflatten(dim, (groups, heads // groups, head))
        return by_head.transpose(dim, dim + 1).flatten(dim, dim + 2)

    if name.endswith("A_log"):
        return tiled(-tensor.exp(), 0, 1)
    if name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
        return tiled(tensor, 0, 1)
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return torch.cat((tensor.squeeze(1)[:keys], tiled(tensor.squeeze(1)[keys:], 0, size)))
    if name.endswith("in_proj_z.weight"):
        return tiled(tensor, 0, size)
    if name.endswith("linear_attn.out_proj.weight"):
        return tiled(tensor, 1, size)
    is_shifted = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
    return tensor + 1 if is_shifted else tensor


ARCHITECTURES = {
    "lfm2": ("lfm2", gguf.MODEL_ARCH.LFM2, describe_lfm2, lambda name, x, config: x.squeeze(1) if x.dim() > 2 else x),
    "qwen35": ("qwen3_5_text", gguf.MODEL_ARCH.QWEN35, describe_qwen35, convert_qwen35),
}


@torch.no_grad()
def write(path: Path, architecture: str, model: Any, kind: Kind) -> Path:
    """Write ``model`` with its matrices in ``kind``, and give it the numbers that the file stands for."""
    _, known, describe, convert = ARCHITECTURES[architecture]
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    describe(writer, model)
    names = gguf.get_tensor_name_map(known, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        used = kind if tensor.dim() == 2 else Kind.F32
        if used is not Kind.F32:
            data, used = encode(tensor.contiguous().numpy(), used)
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, used)))
        stem, _, ending = name.replace(".dt_bias", ".dt_proj.bias").rpartition(".")
        stored = names.get_name(name) if name.endswith("A_log") else f"{names.get_name(stem)}.{ending}"
        data, used = encode(convert(name, tensor, config).contiguous().numpy(), used)
        writer.add_tensor(stored, data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_the_model(
    architecture: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As large as a block: one that lay in two heads would be rounded otherwise in the file's order.
    monkeypatch.setitem(SERVED["qwen3_5_text"], "linear_value_head_dim", 32)
    model = make_model(ARCHITECTURES[architecture][0])
    path = write(tmp_path / "model.gguf", architecture, model, kind)
    assert served_how(EngineConfig(worker=WorkerConfig(model=str(path))), has_gpu=False).by == "built in"
    with torch.inference_mode():
        loaded = load_model(path, "float32")
    assert isinstance(loaded, DecoderModel)
    driver = Driver(loaded)
    row = driver.begin(draw(60, seed=1))
    driver.step((row, [(41, 0)]))
    driver.step((row, [(19, 0)]))
    with torch.inference_mode():
        expected = model(torch.tensor([row.tokens])).logits[0]
    torch.testing.assert_close(torch.cat(row.logits), expected, rtol=2e-3, atol=2e-3)

"""GGUF files of models of which some layers keep a state: the logits of the model that was converted.

Entries and shapes are those of ``conversion/lfm2.py`` in ggml-org/llama.cpp.
"""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.gpu_worker.checkpoint.gguf.files import encode
from tests.gpu_worker.models.transformers.test_states import Driver, draw
from tests.parity.state_checkpoints import make_model
from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.served_how import served_how
from tokenloom.gpu_worker.models.architectures import load_model
from tokenloom.gpu_worker.models.decoder import DecoderModel


@torch.no_grad()
def write_lfm2(path: Path, model: Any, kind: Kind) -> Path:
    """Write ``model`` with its matrices in ``kind``, and give it the numbers that the file stands for."""
    config, writer = model.config, gguf.GGUFWriter(path, "lfm2")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv([0 if each == "conv" else config.num_key_value_heads for each in config.layer_types])
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, config.num_hidden_layers)
    for name, tensor in model.named_parameters():
        stem, _, ending = name.rpartition(".")
        stored, plain = names.get_name(stem), tensor.squeeze(1) if "conv.conv" in name else tensor
        used = kind if tensor.dim() == 2 else Kind.F32
        data, used = encode(plain.contiguous().numpy(), used)
        if used is not Kind.F32:
            tensor.copy_(torch.from_numpy(gguf.quants.dequantize(data, used)))
        writer.add_tensor(f"{stored}.{ending}", data, raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0], ids=str)
def test_logits_are_those_of_the_model(kind: Kind, tmp_path: Path) -> None:
    model = make_model("lfm2")
    path = write_lfm2(tmp_path / "model.gguf", model, kind)
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

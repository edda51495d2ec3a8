"""Writes tiny checkpoints in the layout in which Phi-4-multimodal is published, and loads them into transformers.

Entries are those that copies of the ``config.json`` of microsoft/Phi-4-multimodal-instruct have in public repositories.
Its classes are code in the checkpoint: a layer of the text has a ``base_layer`` and two LoRA adapters, for images and
for sound, which text alone does not use. transformers 5.24 has the same model under other names
(``modeling_phi4_multimodal.py``), without the adapters.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Phi4MMForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "audio_processor": {"config": {"attention_dim": 32}, "name": "cascades"},
    "auto_map": {"AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM"},
    "bos_token_id": 502,
    "embd_layer": {"embedding_cls": "image_audio", "image_embd_layer": {"crop_size": 448}},
    "embd_pdrop": 0.0,
    "eos_token_id": 502,
    "full_attn_mod": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "img_processor": None,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "phi4mm",
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "original_max_position_embeddings": 1024,
    "pad_token_id": 502,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
        "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4],
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "speech_lora": {"dp": 0.01, "layer": "((layers.*self_attn\\.(qkv|o)_proj))", "lora_alpha": 8, "r": 4},
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.46.1",
    "use_cache": True,
    "vision_lora": {"dp": 0.0, "layer": "layers.*((self_attn\\.(qkv_proj|o_proj)))", "lora_alpha": 8, "r": 4},
    "vocab_size": 503,
}
_TOWERS: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 32,
        "image_size": 28,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    },
    "audio_config": {
        "ext_pw_out_channel": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "nemo_conv_channels": 32,
        "num_attention_heads": 2,
        "num_blocks": 1,
    },
}


def write(path: Path, **entries: Any) -> Path:
    """Write a checkpoint with random weights to a new directory; ``entries`` replace those of its configuration."""
    path.mkdir(parents=True)
    torch.manual_seed(7)
    tensors = {}
    for name, tensor in _model(path.name).state_dict().items():
        value = torch.randn(tensor.shape) * (0.1 if tensor.dim() == 1 else 0.2) + float("norm" in name)
        if ".layers." in name and "_proj." in name and "embed_tokens_extend" not in name:
            layer = name.removesuffix(".weight")
            tensors[f"{layer}.base_layer.weight"] = value
            for kind in ("speech", "vision"):
                tensors[f"{layer}.lora_A.{kind}.weight"] = torch.randn(4, tensor.shape[1])
                tensors[f"{layer}.lora_B.{kind}.weight"] = torch.randn(tensor.shape[0], 4)
        elif name != "lm_head.weight":
            tensors[name] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(CONFIG | entries))
    return path


def load(path: Path) -> Any:
    """Return the model of transformers. Raises ``AssertionError`` if a tensor is missing or left over."""
    stored = load_file(path / "model.safetensors")
    own = {name.replace(".base_layer.", "."): each for name, each in stored.items() if ".lora_" not in name}
    model = _model(path.name)
    own["lm_head.weight"] = own["model.embed_tokens.weight"]
    model.load_state_dict(own)
    return model.eval()


def _model(name: str) -> Any:
    names = ("architectures", "auto_map", "model_type", "torch_dtype")
    entries = {key: value for key, value in CONFIG.items() if key not in names}
    config = transformers.Phi4MultimodalConfig(**entries, **_TOWERS, name_or_path=name)
    return transformers.Phi4MultimodalForCausalLM._from_config(config, attn_implementation="eager").float()

"""Writes tiny checkpoints of models that read images, in the layout in which they are published.

Names of tensors and defaults are those of transformers 5.24 (``conversion_mapping.py`` and the configuration of each
class, which saves under the published names); the entries are those of the ``config.json`` of Qwen2-VL-2B-Instruct,
Qwen2.5-VL-32B-Instruct-AWQ, Qwen3-VL-4B-Instruct, Qwen3-VL-30B-A3B-Instruct, Mistral-Small-3.1-24B-Instruct-2503,
Ministral-3-3B-Instruct-2512, SmolVLM-256M-Instruct, SmolVLM2-256M-Video-Instruct, aya-vision-8b, llava-1.5-7b-hf,
llava-v1.6-mistral-7b-hf, llava-onevision-qwen2-0.5b-ov-hf, pixtral-12b, gemma-3-4b-it and InternVL3-1B-hf, of other
sizes.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.gpu_worker.checkpoint.quantization import formats
from tests.parity import phi4_multimodal
from tests.parity.reference import Reference, compute_case, small_prompts
from tests.parity.text_of_releases import TEXT_OF_RELEASES

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 503,
}
_QWEN_TOKENS = {
    "image_token_id": 499,
    "video_token_id": 500,
    "vision_start_token_id": 497,
    "vision_end_token_id": 498,
}
_QWEN2_VL = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "torch_dtype": "float32",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    **_SIZES,
    **_QWEN_TOKENS,
    "vision_token_id": 496,
}
_QWEN3_VL_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "dtype": "float32",
    "eos_token_id": 2,
    "head_dim": 24,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 4, 4], "rope_type": "default"},
    "rope_theta": 5000000,
    "use_cache": True,
    **_SIZES,
}
_QWEN3_VL_TOWER = {
    "deepstack_visual_indexes": [0],
    "depth": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 32,
    "num_heads": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_TOWER = {
    "hidden_size": 32,
    "image_size": 28,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
}
_CLIP = _TOWER | {"model_type": "clip_vision_model", "projection_dim": 16, "vocab_size": 32}
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        **_QWEN2_VL,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": True,
        "vision_config": {
            "depth": 1,
            "embed_dim": 32,
            "mlp_ratio": 4,
            "num_heads": 2,
            "in_chans": 3,
            "hidden_size": 64,
        },
    },
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        **_QWEN2_VL,
        "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
        "tie_word_embeddings": False,
        "vision_config": {
            "depth": 1,
            "fullatt_block_indexes": [0],
            "hidden_size": 32,
            "in_chans": 3,
            "intermediate_size": 32,
            "model_type": "qwen2_5_vl",
            "num_heads": 2,
            "out_hidden_size": 64,
            "spatial_patch_size": 14,
            "tokens_per_second": 2,
        },
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        **_QWEN_TOKENS,
        "model_type": "qwen3_vl",
        "text_config": _QWEN3_VL_TEXT | {"model_type": "qwen3_vl_text", "tie_word_embeddings": True},
        "tie_word_embeddings": True,
        "transformers_version": "4.57.0.dev0",
        "vision_config": _QWEN3_VL_TOWER | {"model_type": "qwen3_vl"},
    },
    "qwen3_vl_moe": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        **_QWEN_TOKENS,
        "model_type": "qwen3_vl_moe",
        "text_config": _QWEN3_VL_TEXT
        | {
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text",
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "vision_config": _QWEN3_VL_TOWER | {"model_type": "qwen3_vl_moe"},
    },
    "mistral3": {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0,
            "head_dim": 24,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "model_type": "mistral",
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0,
            "sliding_window": None,
            "use_cache": True,
            **_SIZES,
        },
        "torch_dtype": "float32",
        "transformers_version": "4.50.0.dev0",
        "vision_config": {
            "attention_dropout": 0.0,
            "head_dim": 16,
            "hidden_act": "silu",
            "hidden_size": 32,
            "image_size": 28,
            "initializer_range": 0.02,
            "intermediate_size": 32,
            "model_type": "pixtral",
            "num_attention_heads": 2,
            "num_channels": 3,
            "num_hidden_layers": 1,
            "patch_size": 14,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    },
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"],
        "ignore_index": -100,
        "image_token_index": 499,
        "model_type": "llava",
        "pad_token_id": 500,
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5",
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "rms_norm_eps": 1e-05,
            "torch_dtype": "float32",
            **_SIZES,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.36.0.dev0",
        "vision_config": _CLIP,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 503,
    },
    "llava_next": {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": [[336, 672], [672, 336]],
        "image_token_index": 499,
        "model_type": "llava_next",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "float32",
            **_SIZES,
        },
        "torch_dtype": "float32",
        "transformers_version": "4.39.0.dev0",
        "use_image_newline_parameter": True,
        "vision_config": _CLIP,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "vocab_size": 503,
    },
    "llava_onevision": {
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "ignore_index": -100,
        "image_grid_pinpoints": [[384, 384], [384, 768]],
        "image_token_index": 499,
        "model_type": "llava_onevision",
        "projector_hidden_act": "gelu",
        "text_config": {
            "_name_or_path": "Qwen/Qwen2-0.5B-Instruct",
            "architectures": ["Qwen2ForCausalLM"],
            "bos_token_id": 1,
            "eos_token_id": 2,
            "max_window_layers": 24,
            "model_type": "qwen2",
            "rope_theta": 1000000.0,
            "sliding_window": 32768,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_sliding_window": False,
            **_SIZES,
        },
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.45.0.dev0",
        "use_image_newline_parameter": True,
        "video_token_index": 500,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": _SIGLIP,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 498,
        "eoi_token_index": 500,
        "eos_token_id": [1, 106],
        "image_token_index": 499,
        "initializer_range": 0.02,
        "mm_tokens_per_image": 4,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 96,
            "model_type": "gemma3_text",
            "num_hidden_layers": 2,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 50,
            "sliding_window_pattern": 2,
            # Published files leave these to the defaults of the class.
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 503,
        },
        "torch_dtype": "float32",
        "transformers_version": "4.50.0.dev0",
        "vision_config": _SIGLIP,
    },
    "internvl": {
        "architectures": ["InternVLForConditionalGeneration"],
        "downsample_ratio": 0.5,
        "image_seq_length": 256,
        "image_token_id": 499,
        "model_type": "internvl",
        "projector_hidden_act": "gelu",
        "text_config": {
            "architectures": ["Qwen2ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
            "rope_theta": 1000000.0,
            "sliding_window": None,
            "torch_dtype": "float32",
            "use_cache": True,
            "use_sliding_window": False,
            **_SIZES,
        },
        "torch_dtype": "float32",
        "transformers_version": "4.52.0.dev0",
        "vision_config": {
            "attention_bias": True,
            "attention_dropout": 0.0,
            "hidden_act": "gelu",
            "hidden_size": 32,
            "image_size": [28, 28],
            "intermediate_size": 32,
            "layer_norm_eps": 1e-06,
            "model_type": "internvl_vision",
            "norm_type": "layer_norm",
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "patch_size": [14, 14],
            "use_qk_norm": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    },
}
CONFIGS["qwen3_5"] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    **_QWEN_TOKENS,
    "model_type": "qwen3_5",
    "text_config": {name: value for name, value in _QWEN3_VL_TEXT.items() if not name.startswith("rope")}
    | {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 16,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 4,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "tie_word_embeddings": False,
    "transformers_version": "4.57.0.dev0",
    "vision_config": _QWEN3_VL_TOWER | {"deepstack_visual_indexes": [], "model_type": "qwen3_5"},
}
CONFIGS["qwen3_5_moe"] = CONFIGS["qwen3_5"] | {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        name: value for name, value in CONFIGS["qwen3_5"]["text_config"].items() if "intermediate" not in name
    }
    | {
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 48,
    },
    "vision_config": CONFIGS["qwen3_5"]["vision_config"] | {"model_type": "qwen3_5_moe"},
}
_MINISTRAL_TEXT = {
    name: value for name, value in CONFIGS["mistral3"]["text_config"].items() if name != "rope_theta"
} | {
    "model_type": "ministral3",
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 16.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 1000000.0,
        "rope_type": "yarn",
        "type": "yarn",
    },
}
_OF_MISTRAL_3 = ("multimodal_projector_bias", "spatial_merge_size")
CONFIGS["pixtral"] = {name: value for name, value in CONFIGS["mistral3"].items() if name not in _OF_MISTRAL_3} | {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "vision_feature_select_strategy": "full",
}
CONFIGS["ministral3"] = CONFIGS["mistral3"] | {"text_config": _MINISTRAL_TEXT, "tie_word_embeddings": False}
# SmolVLM-256M-Instruct is of the class of Idefics3, and names entries that no class reads; SmolVLM2 is of its own.
_SMOLVLM: dict[str, Any] = {
    "image_token_id": 499,
    "scale_factor": 2,
    "text_config": {
        "_flash_attn_2_enabled": True,
        "architectures": ["VLlama3ForCausalLM"],
        "head_dim": 16,
        "is_llama_config": True,
        "model_type": "llama",
        "neftune_noise_alpha": 0.0,
        "pad_token_id": 2,
        "perceiver_config": {"model_type": "vllama3", "resampler_n_heads": 4},
        "pixel_shuffle_factor": 4,
        "qk_layer_norms": False,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_theta": 100000,
        "torch_dtype": "float32",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        "use_resampler": False,
        **_SIZES,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.46.0",
    "use_cache": False,
    "vision_config": _TOWER | {"max_image_size": {"longest_edge": 28}, "tie_word_embeddings": False},
    "vocab_size": 503,
}
CONFIGS["idefics3"] = _SMOLVLM | {"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3"}
CONFIGS["smolvlm"] = _SMOLVLM | {"architectures": ["SmolVLMForConditionalGeneration"], "model_type": "smolvlm"}
CONFIGS["aya_vision"] = {
    "adapter_layer_norm_eps": 1e-06,
    "architectures": ["AyaVisionForConditionalGeneration"],
    "downsample_factor": 2,
    "image_token_index": 499,
    "model_type": "aya_vision",
    "text_config": {
        "layer_norm_eps": 1e-05,
        "layer_types": ["sliding_attention", "full_attention"],
        "logit_scale": 0.25,
        "model_type": "cohere2",
        "rope_theta": 50000,
        "sliding_window": 50,
        "torch_dtype": "float32",
        **_SIZES,
    },
    "torch_dtype": "float32",
    "transformers_version": "4.50.0.dev0",
    "vision_config": _SIGLIP,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
CONFIGS |= TEXT_OF_RELEASES | {"phi4_multimodal": phi4_multimodal.CONFIG}
"""Entries of ``config.json``, mostly by ``model_type``."""
BY_MODULES = ("ministral3", "aya_vision", "gemma4_e2b", "gemma4_e4b", "gemma4_26b_a4b", "phi4_multimodal")
"""Models whose text transformers' modules compute."""
SEPARATE_OUTPUTS = ("mistral3", "internvl")
"""Models whose published files hold an output layer of their own, though their class ties it by default."""
_IN_VISION_MODEL = ("llava", "llava_next", "llava_onevision", "gemma3", "aya_vision")
"""Models whose published towers have one more name in theirs."""


def write_vision(kind: str, directory: Path, vocab_size: int = 503, **entries: Any) -> Path:
    """Write a checkpoint with random weights; ``entries`` of its configuration replace those of ``CONFIGS``."""
    path = directory / kind
    if kind == "phi4_multimodal":
        return phi4_multimodal.write(path, **entries)
    path.mkdir(parents=True)
    config = CONFIGS[kind] | entries
    config |= {"vocab_size": vocab_size} if "vocab_size" in config else {}
    config |= {"text_config": config["text_config"] | {"vocab_size": vocab_size}} if "text_config" in config else {}
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(7)
    read = transformers.AutoConfig.from_pretrained(path)
    if kind in SEPARATE_OUTPUTS:
        read.tie_word_embeddings = False
    model = transformers.AutoModelForImageTextToText.from_config(read)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and "norm" in name
            parameter.normal_(float(is_norm), 0.1 if parameter.dim() == 1 else 0.2)
    model.save_pretrained(path)
    if kind in _IN_VISION_MODEL:
        _rename(path / "model.safetensors", "vision_tower.", "vision_tower.vision_model.")
    if kind == "qwen3_vl_moe":
        _transpose_experts(path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))  # spelled as it is published
    return path


def _rename(file: Path, old: str, new: str) -> None:
    tensors = load_file(file)
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, file, {"format": "pt"})


def _transpose_experts(file: Path) -> None:
    """Store the matrices of experts as [experts, in, out], as published; transformers 5 saves [experts, out, in]."""
    tensors = load_file(file)
    changed = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    assert changed["model.language_model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 64, 96)
    save_file(changed, file, {"format": "pt"})


def quantize_experts(path: Path) -> tuple[Path, Path]:
    """Write the experts of a checkpoint in blocks of 8-bit floats, as Qwen3-VL-30B-A3B-Instruct-FP8 stores those of all
    in one tensor, and the checkpoint with the weights that it then has; return both."""
    quantize, stored, plain = formats.fp8("block", "scale_inv", 16), {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if ".experts." in name:
            each = [quantize(matrix) for matrix in tensor]
            stored[name] = torch.stack([parts["weight"] for parts, _ in each])
            stored[f"{name}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in each])
            plain[name] = torch.stack([value for _, value in each])
    entries = json.loads((path / "config.json").read_text())
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [16, 16]}
    paths = path / "quantized", path / "plain"
    for each_path, tensors, more in zip(paths, (stored, plain), ({"quantization_config": config}, {}), strict=True):
        each_path.mkdir()
        (each_path / "config.json").write_text(json.dumps(entries | more))
        save_file(tensors, each_path / "model.safetensors", {"format": "pt"})
    return paths


def load_vision(path: Path) -> Any:
    """Return the model as transformers loads it. Raises ``AssertionError`` if a tensor is missing or left over."""
    if json.loads((path / "config.json").read_text())["model_type"] == "phi4mm":
        return phi4_multimodal.load(path)
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    # The whole Llama 4 of transformers 5.24 fails where there is no image; its text model is a class of its own.
    return (model.language_model if model.config.model_type == "llama4" else model).eval()


def make_vision_reference(kind: str, directory: Path, longest: int) -> Reference:
    """Write a checkpoint and compute the reference's tokens of prompts of at most ``longest`` tokens."""
    path = write_vision(kind, directory)
    model = load_vision(path)
    return Reference(path, (), [compute_case(model, prompt) for prompt in small_prompts(503, longest)])

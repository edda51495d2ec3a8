"""Makes a small random checkpoint of any causal language model of transformers."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.parity.state_checkpoints import entries_of

LARGEST = 40_000_000
"""Parameters that a tiny configuration may give; more means that its class ignores the small sizes."""

_HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size", "dim")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "mlp_hidden_size", "decoder_ffn_dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads")
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHAPES: dict[str, Any] = {
    **dict.fromkeys(_HIDDEN, 64),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_POSITIONS, 128),
    **dict.fromkeys(_EXPERTS, 4),
    "vocab_size": 128,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "rotary_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 24,
    "attention_window_size": 24,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 128,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "is_decoder": True,
}


_SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"n_shared_experts": 1},
    "qwen3_5_moe_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "indexed_attention"]},
    "bailing_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "zamba": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "hybrid"] * 2},
    # Its hybrid layers share one attention.
    "zamba2": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "num_mem_blocks": 1,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "blt": {"encoder_hash_byte_group_vocab": 1000},
    "reformer": {"axial_pos_embds_dim": (16, 48), "axial_pos_shape": (8, 16)},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        }
    },
    "longcat_flash": {"head_dim": 8},
}
"""What other classes demand of their sizes."""


def tiny_config(kind: str) -> Any:
    """Return the smallest useful configuration of a model type, made from its class."""
    config_class: Any = CONFIG_MAPPING[kind]
    fields = set(inspect.signature(config_class.__init__).parameters)
    for name in ("attribute_map", "__annotations__", "__dataclass_fields__"):
        fields |= set(getattr(config_class, name, {}))
    values = {name: value for name, value in _SHAPES.items() if name in fields}
    if "kv_lora_rank" in fields:  # latent attention: as many KV heads as query heads, and sizes of its own
        values |= {"num_key_value_heads": 4} if "num_key_value_heads" in fields else {}
        values.pop("head_dim", None)
    values |= {name: tiny_config(part) for name, part in _parts(config_class)}
    return config_class(**values | _SPECIAL.get(kind, {}) | entries_of(kind))


def _parts(config_class: Any) -> Iterator[tuple[str, str]]:
    """Yield the entries of a configuration that hold another one, and the model type of each."""
    for name, part in config_class.sub_configs.items():
        if not issubclass(part, PreTrainedConfig):  # any type; the default says which
            part = type(getattr(config_class(), name, None))
        if part is not config_class and getattr(part, "model_type", None) in CONFIG_MAPPING:
            yield name, part.model_type


def switches(kind: str) -> list[tuple[str, bool]]:
    """Return the entries that only this type's class has and that are true or false, each with the other value."""
    config = tiny_config(kind).get_text_config(decoder=True)
    common = PreTrainedConfig().to_dict()
    own = {name: value for name, value in config.to_dict().items() if type(value) is bool and name not in common}
    return sorted((name, not value) for name, value in own.items() if name not in _NOT_COMPUTED)


_NOT_COMPUTED = frozenset(
    ("use_cache", "tie_word_embeddings", "output_router_logits", "is_decoder", "add_cross_attention")
)
"""Switches that change no step, or that ask for another kind of model."""


def save_tiny(kind: str, directory: Path, **entries: Any) -> tuple[Path, Any]:
    """Write a checkpoint with seeded weights; returns its directory and the model, with eager attention.

    ``entries`` replace those of the tiny configuration. Raises ``ValueError`` if the model is not small.
    """
    config = tiny_config(kind)
    for name, value in entries.items():
        setattr(config.get_text_config(decoder=True), name, value)
    torch.manual_seed(0)
    with torch.device("meta"):
        size = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"a tiny configuration has {size / 1e6:.0f} million parameters")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = float(parameter.dim() < 2 and "norm" in name)
            parameter.normal_(center, 0.08, generator=generator)
    path = directory / kind
    model.save_pretrained(path)
    return path, model

"""Writes tiny random checkpoints of models that keep a state between tokens, whose answers depend on every token."""

from pathlib import Path
from typing import Any

import torch
import transformers

_SIZES = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "vocab_size": 512,
}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_THREE_OF_FOUR = ["linear_attention"] * 3 + ["full_attention"]
_DELTA = {
    "head_dim": 16,
    "layer_types": _THREE_OF_FOUR,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
}
_MAMBA = {
    "mamba_chunk_size": 64,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_n_heads": 8,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_OF_MAMBA_2 = {"chunk_size": 64, "n_groups": 2}
_OF_MAMBA = {"num_hidden_layers": 4, "state_size": 16, "time_step_rank": 4}

SERVED: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        **_HEADS,
        **_DELTA,
        **_EXPERTS,
        "intermediate_size": 96,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_HEADS, **_DELTA, "intermediate_size": 96},
    "olmo_hybrid": {
        "intermediate_size": 96,
        "layer_types": _THREE_OF_FOUR,
        "linear_key_head_dim": 12,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "granitemoehybrid": {
        **_HEADS,
        **_MAMBA,
        "intermediate_size": 32,
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_experts_per_tok": 2,
        "num_local_experts": 4,
        "position_embedding_type": "nope",
        "shared_intermediate_size": 32,
    },
    "bamba": {**_HEADS, **_MAMBA, "attn_layer_indices": [2], "intermediate_size": 96},
    "nemotron_h": {
        **_HEADS,
        **_OF_MAMBA_2,
        "head_dim": 16,
        "intermediate_size": 96,
        "layers_block_type": ["mamba", "mlp", "attention", "mamba"],
        "mamba_head_dim": 16,
        "mamba_num_heads": 8,
        "num_hidden_layers": ...,
        "ssm_state_size": 16,
    },
    "lfm2": {
        **_HEADS,
        "block_auto_adjust_ff_dim": False,
        "intermediate_size": 96,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "kimi_linear": {
        **_EXPERTS,
        "intermediate_size": 96,
        "kv_lora_rank": 64,
        "layer_types": _THREE_OF_FOUR,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
    },
    "falcon_h1": {**_HEADS, **_MAMBA, "intermediate_size": 96, "mamba_d_ssm": 128},
    "mamba2": {**_OF_MAMBA_2, "head_dim": 16, "num_heads": 8, "state_size": 16},
    "mamba": _OF_MAMBA,
    "falcon_mamba": _OF_MAMBA,
    "jamba": {
        **_HEADS,
        "attn_layer_offset": 2,
        "attn_layer_period": 4,
        "intermediate_size": 96,
        "mamba_dt_rank": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
"""By model type, what the configuration has beside the sizes; ``...``: not even that of the sizes."""
EXACT_ANYWHERE = ("lfm2", "mamba", "falcon_mamba", "jamba")
"""Those whose bits do not depend on where a prompt is cut."""


def entries_of(kind: str) -> dict[str, Any]:
    """Return the entries of a model type that keeps a state, but for the size of its vocabulary; of others none."""
    if kind not in SERVED:
        return {}
    return {name: each for name, each in {**_SIZES, **SERVED[kind]}.items() if each is not ... and name != "vocab_size"}


def make_model(kind: str, dtype: torch.dtype = torch.float32, **entries: Any) -> Any:
    """Return transformers' model of this type, with further ``entries`` of its configuration."""
    entries = {"vocab_size": _SIZES["vocab_size"], **entries_of(kind), **entries}
    config = transformers.AutoConfig.for_model(kind, **entries)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(2)
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and "conv" not in name:
            weight.copy_(torch.randn(weight.shape, generator=generator) * (1.5 / weight.shape[-1] ** 0.5))
    return model.to(dtype)


def write_model(kind: str, path: Path, dtype: torch.dtype = torch.float32, **entries: Any) -> Path:
    """Write the checkpoint of this model type to ``path`` and return that."""
    make_model(kind, dtype, **entries).save_pretrained(path)
    return path

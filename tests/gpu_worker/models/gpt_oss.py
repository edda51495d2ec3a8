"""Writes tiny checkpoints in the layout in which gpt-oss is published, with experts in MXFP4 or in bfloat16.

Names, shapes and dtypes are those of transformers 5.24, ``models/gpt_oss/modeling_gpt_oss.py`` and
``integrations/mxfp4.py``; the entries of ``config.json`` are those of openai/gpt-oss-20b.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, EXPERTS, LAYERS, VOCABULARY = 64, 96, 4, 2, 16, 8, 4, 503
"""Of the tiny checkpoint. Gate and up are of unequal size to the hidden state, so that a transposed matrix is seen."""

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 502,
    "experts_per_token": 3,
    "head_dim": HEAD,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initial_context_length": 64,
    "initializer_range": 0.02,
    "intermediate_size": INNER,
    "layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2),
    "max_position_embeddings": 2048,
    "model_type": "gpt_oss",
    "num_attention_heads": HEADS,
    "num_experts_per_tok": 3,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": EXPERTS,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    "vocab_size": VOCABULARY,
}
MXFP4: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
"""The value of each code of four bits (OCP Microscaling Formats 1.0, table 5)."""


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return [experts, out, in] float32 of blocks [experts, out, groups, 16] and scales [experts, out, groups]: each
    byte holds two numbers, the first in its lower half, and a scale is a power of two, with a bias of 127."""
    codes = blocks.numpy()
    numbers = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(*codes.shape[:-1], 32)
    values = numbers * np.exp2(scales.numpy().astype(np.float64) - 127)[..., None]
    return torch.from_numpy(values.reshape(*codes.shape[:2], -1).astype(np.float32))


def random_blocks(generator: torch.Generator, *shape: int) -> tuple[Tensor, Tensor]:
    """Return the blocks and scales of a random weight [experts, out, in], in which every code occurs."""
    experts, outputs, inputs = shape
    blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 125, blocks.shape[:3], generator=generator, dtype=torch.uint8)


def write_gpt_oss(path: Path, *, mxfp4: bool = True, **entries: Any) -> Path:
    """Write the checkpoint; without ``mxfp4`` its experts are the same numbers as plain tensors."""
    generator = torch.Generator().manual_seed(7)

    def plain(*shape: int, mean: float = 0.0, scale: float = 0.2) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale + mean).bfloat16()

    tensors = {
        "model.embed_tokens.weight": plain(VOCABULARY, HIDDEN, scale=1.0),
        "model.norm.weight": plain(HIDDEN, mean=1.0),
        "lm_head.weight": plain(VOCABULARY, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for name, outputs, inputs in (
            ("q_proj", HEADS * HEAD, HIDDEN),
            ("k_proj", KV_HEADS * HEAD, HIDDEN),
            ("v_proj", KV_HEADS * HEAD, HIDDEN),
            ("o_proj", HIDDEN, HEADS * HEAD),
        ):
            tensors[f"{at}.self_attn.{name}.weight"] = plain(outputs, inputs)
            tensors[f"{at}.self_attn.{name}.bias"] = plain(outputs)
        tensors[f"{at}.self_attn.sinks"] = plain(HEADS, mean=1.0, scale=1.0)
        tensors[f"{at}.input_layernorm.weight"] = plain(HIDDEN, mean=1.0)
        tensors[f"{at}.post_attention_layernorm.weight"] = plain(HIDDEN, mean=1.0)
        tensors[f"{at}.mlp.router.weight"], tensors[f"{at}.mlp.router.bias"] = plain(EXPERTS, HIDDEN), plain(EXPERTS)
        # Large biases, so that gates and ups pass the limit of 7 on both sides.
        tensors[f"{at}.mlp.experts.gate_up_proj_bias"] = plain(EXPERTS, 2 * INNER, scale=4.0)
        tensors[f"{at}.mlp.experts.down_proj_bias"] = plain(EXPERTS, HIDDEN)
        for name, outputs, inputs in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            blocks, scales = random_blocks(generator, EXPERTS, outputs, inputs)
            if mxfp4:
                tensors[f"{at}.mlp.experts.{name}_blocks"] = blocks
                tensors[f"{at}.mlp.experts.{name}_scales"] = scales
            else:
                matrix = dequantized(blocks, scales).transpose(1, 2).contiguous()
                tensors[f"{at}.mlp.experts.{name}"] = matrix.bfloat16()
    path.mkdir(parents=True, exist_ok=True)
    quantization = {"quantization_config": MXFP4} if mxfp4 else {}
    (path / "config.json").write_text(json.dumps(CONFIG | quantization | entries))
    (path / "generation_config.json").write_text(
        json.dumps({"bos_token_id": 501, "do_sample": True, "eos_token_id": [502, 500], "pad_token_id": 0})
    )
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path

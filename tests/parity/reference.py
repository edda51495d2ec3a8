"""The reference: transformers, float32, ``generate(do_sample=False)``, one prompt at a time."""

import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.gpu_worker.models.gpt_oss import write_gpt_oss
from tests.parity.identical import Case
from tokenloom.model_files.model_path import DEMO_MODEL

NUM_TOKENS = 24
_FAMILY = [1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 40, 48, 63, 64, 65, 80]
_LONG = [100, 127, 128, 129, 200, 260, 333, 400, 511, 600]
_MEMBERS = 6

_SHAPES = {
    "vocab_size": 503,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # so large that what a token attends to decides what follows
    "bos_token_id": None,
    "eos_token_id": None,
}
_GPT2_SHAPES = {"vocab_size": 503, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_CONFIGS = {
    "llama": {"rope_parameters": _LLAMA3},
    "mistral": {"sliding_window": 50},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 24},
    "gpt2": {"initializer_range": 0.4, "bos_token_id": None, "eos_token_id": None, **_GPT2_SHAPES},
}
MODELS = [*_CONFIGS, "demo"]
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 50, "pad_token_id": 0}
_OPT_SHAPES = {"vocab_size": 503, "hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_QWEN_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
# The entries of published files, of other sizes: deepseek-ai/DeepSeek-V3 and DeepSeek-V2-Lite (config.json).
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32, "beta_slow": 1}
_DEEPSEEK_ROPE = {**_YARN, "original_max_position_embeddings": 128, "mscale": 0.707, "mscale_all_dim": 0.707}
_MORE_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"pad_token_id": 0, "sliding_window": 60},
    "olmo2": {},
    "smollm3": {"pad_token_id": 0, "no_rope_layers": [1, 0]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**_QWEN_EXPERTS, "head_dim": 24, "norm_topk_prob": True},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 50,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    },
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "rope_parameters": _DEEPSEEK_ROPE, "routed_scaling_factor": 1.5},
    "deepseek_v3": {
        **_LATENT,
        "kv_lora_rank": 64,  # of which the kernel takes multiples
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "rope_parameters": {**_DEEPSEEK_ROPE, "mscale": 1.0},
    },
    "llama4_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 1, 0, 1],
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 80,
        "num_local_experts": 4,
        "attention_chunk_size": 64,
        "floor_scale": 32,
        "attn_scale": 0.5,
    },
    "opt": {
        "init_std": 0.2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        **_OPT_SHAPES,
    },
}
SMALL_CONFIGS = _CONFIGS | _MORE_CONFIGS
"""Entries of the configurations of all models that are built in, for :func:`save_random`."""
MORE_MODELS = list(_MORE_CONFIGS)
"""Models that take fewer cases: they share all but their layers with the first."""
_LIBRARY_CONFIGS: dict[str, dict[str, Any]] = {
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "pad_token_id": 0},
    "glm4": {"head_dim": 16, "pad_token_id": 0},
}
LIBRARY_MODELS = list(_LIBRARY_CONFIGS)
"""Models that transformers' modules compute."""


@dataclass(frozen=True)
class Reference:
    """A checkpoint and what transformers makes of 32 prompts."""

    path: Path
    eos_token_ids: tuple[int, ...]
    cases: list[Case]


@functools.cache  # the end-to-end tests have the demo model's too
def demo_reference() -> Reference:
    """Return what transformers makes of the demo model."""
    return _reference(DEMO_MODEL)


def make_reference(name: str, directory: Path) -> Reference:
    """Writes a small random checkpoint (or takes the demo model) and computes the reference's tokens."""
    return demo_reference() if name == "demo" else _reference(save_random(name, directory, **_CONFIGS[name]))


def make_small_reference(name: str, directory: Path, longest: int = 600) -> Reference:
    """Write a small random checkpoint of ``MORE_MODELS`` or ``LIBRARY_MODELS`` and compute the reference's tokens for
    a third of the prompts, which have at most ``longest`` tokens."""
    path = save_random(name, directory, **(_MORE_CONFIGS | _LIBRARY_CONFIGS)[name])
    return _reference(path, lambda prompts: [prompt for prompt in prompts if len(prompt) <= longest][::3])


def make_gpt_oss_reference(directory: Path, longest: int = 600, **entries: Any) -> Reference:
    """Write a tiny gpt-oss in the published layout, whose experts are MXFP4, and compute the reference's tokens, as
    :func:`make_small_reference`, with the weights that transformers unpacks. ``entries``: of the configuration."""
    path = write_gpt_oss(directory / "gpt-oss", **entries)
    unpacks = transformers.Mxfp4Config(dequantize=True)
    return _reference(
        path, lambda prompts: [prompt for prompt in prompts if len(prompt) <= longest][::3], quantization_config=unpacks
    )


def _reference(path: Path, choose: Callable[[list[list[int]]], list[list[int]]] = list, **loading: Any) -> Reference:
    """``choose``: returns those of the prompts to compute. ``loading``: more arguments of ``from_pretrained``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", **loading
    )
    eos = model.generation_config.eos_token_id
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    prompts = choose(_prompts(model.config.vocab_size))
    return Reference(path, eos_token_ids, [compute_case(model, prompt) for prompt in prompts])


def save_random(model_type: str, directory: Path, dtype: torch.dtype = torch.float32, **entries: Any) -> Path:
    """Write a checkpoint with random weights of ``dtype``; ``entries`` of its configuration replace the defaults."""
    shapes = {} if model_type in ("gpt2", "opt") else _SHAPES
    config = transformers.AutoConfig.for_model(model_type, **{**shapes, **entries})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # zeros and ones would hide a bias or norm that is left out
            torch.nn.init.normal_(parameter, float("norm" in name or "ln_" in name), 0.1)
    for name, buffer in model.named_buffers():
        if "score_correction" in name:
            torch.nn.init.normal_(buffer, 0.0, 0.1)
    path = directory / model_type
    model.to(dtype).save_pretrained(path)
    return path


def add_demo_tokenizer(path: Path) -> Path:
    """Copy the demo model's tokenizer and chat template into a checkpoint, whose vocabulary may be smaller."""
    for file in (*DEMO_MODEL.glob("tokenizer*.json"), *DEMO_MODEL.glob("*.jinja")):
        shutil.copy(file, path)
    return path


def small_prompts(vocab_size: int, longest: int = 300) -> list[list[int]]:
    """Return a quarter of the prompts, which have at most ``longest`` tokens."""
    return [prompt for prompt in _prompts(vocab_size) if len(prompt) <= longest][::4]


def _prompts(vocab_size: int) -> list[list[int]]:
    """32 prompts of 1 to 600 tokens: some of every length around a block's, some that share their beginnings."""
    generator = np.random.default_rng(11)
    prompts = [generator.integers(3, vocab_size, length).tolist() for length in _FAMILY + _LONG]
    shared = prompts[_FAMILY.index(80)]
    members = [shared[: 16 * i + 8] + generator.integers(3, vocab_size, 5 * i + 1).tolist() for i in range(_MEMBERS)]
    order = generator.permutation(len(prompts) + _MEMBERS)
    return [(prompts + members)[i] for i in order]


@torch.inference_mode()
def compute_case(
    model: transformers.PreTrainedModel, prompt: list[int], num_tokens: int = NUM_TOKENS, *, use_cache: bool = True
) -> Case:
    """Generate greedily, one prompt alone."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        use_cache=use_cache,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    return Case(prompt, tokens, torch.cat(output.logits).numpy())

"""The configurations that the hub has of well-known models are read, entry by entry; none names what is not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokenloom.gpu_worker.checkpoint.files.config_reader import UnsupportedError
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.rope_config import QueryScaling, no_rotation

_COMMON = {"attention_dropout": 0.0, "initializer_range": 0.02, "use_cache": True, "transformers_version": "4.50.0"}
_SILU = {**_COMMON, "hidden_act": "silu", "torch_dtype": "bfloat16"}
_GEMMA = {**_COMMON, "attention_bias": False, "cache_implementation": "hybrid", "torch_dtype": "bfloat16"}
_DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# Without its quantization_config, which has tests of its own.
_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
    **_SILU,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": {
        "_name_or_path": "facebook/opt-125m",
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_dropout": 0.0,
        "activation_function": "relu",
        "attention_dropout": 0.0,
        "dropout": 0.1,
        "do_layer_norm_before": True,
        "ffn_dim": 3072,
        "hidden_size": 768,
        "init_std": 0.02,
        "layerdrop": 0.0,
        "max_position_embeddings": 2048,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "prefix": "</s>",
        "torch_dtype": "float16",
        "vocab_size": 50272,
        "word_embed_proj_dim": 768,
        "pad_token_id": 1,
    },
    "google/gemma-2-2b-it": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_size": 2304,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "vocab_size": 256000,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        **_GEMMA,
    },
    "google/gemma-3-1b-it": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "vocab_size": 262144,
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        **_GEMMA,
    },
    "microsoft/Phi-3-mini-4k-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "auto_map": {"AutoConfig": "x.Phi3Config"},
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "attention_bias": False,
        "hidden_size": 3072,
        "vocab_size": 32064,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 2047,
        "tie_word_embeddings": False,
        **_SILU,
    },
    "allenai/OLMo-2-0425-1B": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 4096,
        "vocab_size": 100352,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "num_key_value_heads": 16,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000,
        "tie_word_embeddings": False,
        **_SILU,
    },
    "HuggingFaceTB/SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "mlp_bias": False,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
        **_SILU,
    },
    "mistralai/Mixtral-8x7B-v0.1": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "output_router_logits": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "router_aux_loss_coef": 0.02,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
        **_SILU,
    },
    "Qwen/Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
        **_SILU,
    },
    "openai/gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
        **_SILU,
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "auto_map": {"AutoConfig": "x.DeepseekV2Config"},
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
        "vocab_size": 102400,
        **_SILU,
    },
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK_V3,
    "moonshotai/Kimi-K2-Instruct": _DEEPSEEK_V3
    | {
        "model_type": "kimi_k2",
        "first_k_dense_replace": 1,
        "max_position_embeddings": 131072,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "rope_scaling": _DEEPSEEK_YARN | {"beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
    "moonshotai/Moonlight-16B-A3B": _DEEPSEEK_V3
    | {
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 11264,
        "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446,
        "topk_group": 1,
        "vocab_size": 163840,
    },
}
PHI_3_MINI_128K = CONFIGS["microsoft/Phi-3-mini-4k-instruct"] | {
    "max_position_embeddings": 131072,
    "sliding_window": 262144,
    "rope_scaling": {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48},
}
PHI_4_MINI = CONFIGS["microsoft/Phi-3-mini-4k-instruct"] | {
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1.0] * 48},
}


# Values of the text as copies of its config.json in public repositories have them; only the entries of the tower that
# the class needs to be made.
LLAMA_4_SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0.dev0",
    "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
}


MUSE_GLIMMER_SCALES = {
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.19611613513818404,
    "post_norm_eps": 1e-08,
    "qk_scale_factor": 3.87,
    "sliding_window": 2048,
}
MUSE_GLIMMER: dict[str, Any] = {
    "architectures": ["MuseGlimmerForConditionalGeneration"],
    "dtype": "bfloat16",
    "eos_token_id": [200001, 200008],
    "image_token_id": 200092,
    "model_type": "muse_glimmer",
    "out_hidden_size": 6144,
    "projector_hidden_act": "gelu",
    "projector_hidden_size": 4096,
    "text_config": {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
        "head_dim": 128,
        "hidden_activation": "silu",
        "hidden_size": 6656,
        "initializer_range": 0.02,
        "intermediate_size": 19968,
        "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0.0] * 13,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 13,
        "max_position_embeddings": 131072,
        "model_type": "muse_glimmer_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "pad_token_id": None,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 202048,
        **MUSE_GLIMMER_SCALES,
    },
    "vision_config": {"hidden_size": 1536, "model_type": "muse_glimmer_vision"},
}


def write(config: dict[str, Any], directory: Path) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", CONFIGS)
def test_is_built_in(name: str, tmp_path: Path) -> None:
    config = load_model_config(write(CONFIGS[name], tmp_path))
    assert config.max_model_len == CONFIGS[name]["max_position_embeddings"]


@pytest.mark.parametrize("name", [name for name in CONFIGS if "Deepseek" in CONFIGS[name]["architectures"][0]])
def test_compressed_vectors_take_their_elements_and_no_more(name: str, tmp_path: Path) -> None:
    config = load_model_config(write(CONFIGS[name], tmp_path))
    assert config.kv_bytes_per_token == CONFIGS[name]["num_hidden_layers"] * (512 + 64) * 2


@pytest.mark.parametrize(
    ("wanted", "context", "is_long"), [(None, 4096, False), (4096, 4096, False), (8192, 131072, True)]
)
def test_long_rope_follows_the_longest_request(wanted: int | None, context: int, is_long: bool, tmp_path: Path) -> None:
    config = load_model_config(write(PHI_3_MINI_128K, tmp_path), max_model_len=wanted)
    assert (config.max_model_len, config.rope_stretch == "long-rope") == (context, is_long)


@pytest.mark.parametrize(
    ("rope", "wanted", "context"),
    [
        ({"type": "linear", "factor": 4.0}, None, 16384),
        ({"rope_type": "linear", "factor": 4.0}, 9000, 16384),
        ({"type": "dynamic", "factor": 2.0}, None, 4096),
        ({"type": "dynamic", "factor": 2.0}, 4096, 4096),
        ({"type": "dynamic", "factor": 2.0}, 5000, 8192),
        ({"type": "dynamic", "factor": 2.0}, 99999, 8192),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}, None, 8192),
        ({"rope_type": "default", "factor": 4.0}, None, 4096),
    ],
)
def test_scaled_positions_reach_their_context(
    rope: dict[str, Any], wanted: int | None, context: int, tmp_path: Path
) -> None:
    """As _get_and_verify_max_len of vllm/config/model.py derives it, but dynamic rope is not stretched unasked.

    The class and transformers' modules say the same."""
    from transformers import AutoConfig

    from tokenloom.gpu_worker.models.transformers.declared import max_model_len

    entries = {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": dict(rope), "hidden_size": 64}
    more = {"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    path = write(entries | more | {"dtype": "float32"}, tmp_path)
    if "default" in rope.values():
        with pytest.raises(UnsupportedError, match=r"factor = 4\.0"):
            load_model_config(path)
    else:
        assert load_model_config(path, max_model_len=wanted).max_model_len == context
    assert max_model_len(AutoConfig.from_pretrained(path), wanted) == context


def test_the_context_of_gemma_3_is_stretched_already(tmp_path: Path) -> None:
    rope = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert load_model_config(write(CONFIGS["google/gemma-3-1b-it"] | rope, tmp_path)).max_model_len == 32768


def test_phi_4_mini_is_left_to_transformers(tmp_path: Path) -> None:
    from tokenloom.gpu_worker.checkpoint.served_how import choose
    from tokenloom.gpu_worker.models.transformers.declared import max_model_len
    from tokenloom.gpu_worker.models.transformers.loading import find_causal_class

    path = write(PHI_4_MINI, tmp_path)
    with pytest.raises(UnsupportedError, match="partial_rotary_factor must be 1"):
        load_model_config(path)
    assert choose(path).by == "transformers"
    assert max_model_len(find_causal_class(path).config) == 4096
    assert max_model_len(find_causal_class(path).config, 8192) == PHI_4_MINI["max_position_embeddings"]


GPT_OSS = CONFIGS["openai/gpt-oss-20b"]


def test_gpt_oss_without_its_entries_is_what_the_class_makes_of_them(tmp_path: Path) -> None:
    """``models/gpt_oss/configuration_gpt_oss.py`` of transformers 5.24 has these defaults."""
    defaults = ("attention_bias", "layer_types", "rope_scaling", "rope_theta", "sliding_window", "swiglu_limit")
    sizes = ("head_dim", "hidden_act", "max_position_embeddings", "num_experts_per_tok", "num_key_value_heads")
    config = {name: value for name, value in GPT_OSS.items() if name not in (*defaults, *sizes)}
    (tmp_path / "published").mkdir()
    assert load_model_config(write(config | {"max_position_embeddings": 131072}, tmp_path)) == load_model_config(
        write(GPT_OSS, tmp_path / "published")
    )


def test_llama_4_attends_in_chunks_where_it_rotates(tmp_path: Path) -> None:
    config = load_model_config(write(LLAMA_4_SCOUT, tmp_path))
    assert config.attention_chunks == (8192, 8192, 8192, None) * 12
    assert [rope.rotates for rope in config.ropes] == [True, True, True, False] * 12
    assert config.ropes[3].scaling == QueryScaling(0.1, 8192)
    assert config.experts is not None
    assert config.experts.layers == (True,) * 48
    assert (config.experts.intermediate_size, config.intermediate_size) == (8192, 16384)
    assert config.max_model_len == 10485760
    # In a context that one chunk holds, nothing is left of either.
    short = load_model_config(tmp_path, max_model_len=8191)
    assert (set(short.attention_chunks), short.ropes[3]) == ({None}, no_rotation(128))


@pytest.mark.parametrize(
    ("entries", "chunks", "rotating", "experts"),
    [
        ({"attention_chunk_size": None}, [None] * 48, 36, 48),
        ({"no_rope_layers": [0, 1] * 24}, [None, 8192] * 24, 24, 48),
        ({"layer_types": ["chunked_attention"] * 48}, [8192] * 48, 36, 48),
        ({"interleave_moe_layer_step": 2}, [8192, 8192, 8192, None] * 12, 36, 24),
        ({"moe_layers": [0, 7]}, [8192, 8192, 8192, None] * 12, 36, 2),
        ({"attn_temperature_tuning": 4}, [8192, 8192, 8192, None] * 12, 36, 48),
    ],
)
def test_entries_of_llama_4(
    entries: dict[str, Any], chunks: list[int | None], rotating: int, experts: int, tmp_path: Path
) -> None:
    text = LLAMA_4_SCOUT["text_config"] | entries
    config = load_model_config(write(LLAMA_4_SCOUT | {"text_config": text}, tmp_path))
    assert config.experts is not None
    assert list(config.attention_chunks) == chunks
    assert (sum(rope.rotates for rope in config.ropes), sum(config.experts.layers)) == (rotating, experts)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok must be 1"),
        ({"layer_types": ["sliding_attention"] * 48}, "may only hold full_attention and chunked_attention"),
        ({"attn_temperature_tuning": "on"}, "attn_temperature_tuning must be"),
        ({"moe_layers": "all"}, "moe_layers must be a list"),
    ],
)
def test_what_llama_4_does_not_compute_is_refused(entries: dict[str, Any], reason: str, tmp_path: Path) -> None:
    text = LLAMA_4_SCOUT["text_config"] | entries
    with pytest.raises(ValueError, match=reason):
        load_model_config(write(LLAMA_4_SCOUT | {"text_config": text}, tmp_path))


def test_muse_glimmer_without_its_entries_is_what_the_class_makes_of_them(tmp_path: Path) -> None:
    """``models/muse_glimmer/configuration_muse_glimmer.py`` of transformers 5.24 has these defaults."""
    listed = ("layer_rope_theta", "layer_types")
    text = MUSE_GLIMMER["text_config"]
    published = load_model_config(write(MUSE_GLIMMER, tmp_path))
    defaults = {name: value for name, value in text.items() if name not in (*listed, *MUSE_GLIMMER_SCALES)}
    assert load_model_config(write(MUSE_GLIMMER | {"text_config": defaults}, tmp_path)) == published
    assert published.sliding_windows == (2048, 2048, 2048, None) * 13
    assert [rope.rotates for rope in published.ropes] == [True, True, True, False] * 13
    for entry, value in (("layer_rope_theta", [5e5] * 3), ("layer_types", ["chunked_attention"] * 52)):
        with pytest.raises(ValueError, match=f"{entry} m"):
            load_model_config(write(MUSE_GLIMMER | {"text_config": text | {entry: value}}, tmp_path))


@pytest.mark.parametrize(("entry", "value"), [("swiglu_limit", 10.0), ("swiglu_alpha", 1.0)])
def test_another_gate_of_gpt_oss_is_left_to_transformers(entry: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=f"{entry} must be"):
        load_model_config(write(GPT_OSS | {entry: value}, tmp_path))

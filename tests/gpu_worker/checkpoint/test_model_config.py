"""What is read from ``config.json``, and what is refused by name."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenloom.gpu_worker.checkpoint.load_config import load_model_config, note_precision
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig, OPTSwitches, RouterSwitches
from tokenloom.gpu_worker.checkpoint.rope_config import RopeConfig, no_rotation

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "float32",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GPT2: dict[str, Any] = {
    "architectures": ["GPT2LMHeadModel"],
    "dtype": "float32",
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
}
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

Load = Callable[..., ModelConfig]


OPT: dict[str, Any] = {
    "architectures": ["OPTForCausalLM"],
    "dtype": "float32",
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """``load(base, asked_dtype, **entries)``: the configuration of ``base`` with these entries changed."""

    def load(base: dict[str, Any], asked_dtype: str = "auto", /, **entries: Any) -> ModelConfig:
        (tmp_path / "config.json").write_text(json.dumps(base | entries))
        return load_model_config(tmp_path, asked_dtype)

    return load


def architecture(name: str) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), "head_dim": 16}


def test_shapes(load: Load) -> None:
    config = load(LLAMA)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (4, 4, 2, 16)
    assert (config.vocab_size, config.hidden_size, config.max_model_len) == (100, 64, 256)
    assert config.kv_bytes_per_token == 2 * 4 * 2 * 16 * 4
    assert not config.tie_word_embeddings
    assert load(GPT2).tie_word_embeddings


def test_the_cache_holds_heads_of_whole_16s(load: Load) -> None:
    config = load(LLAMA, head_dim=20)
    assert (config.head_size, config.cache_head_size) == (20, 32)
    assert config.kv_bytes_per_token == 2 * 4 * 2 * 32 * 4


@pytest.mark.parametrize(
    ("declared", "asked", "expected"),
    [
        ({"dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "auto", torch.bfloat16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "auto", torch.float32),
        ({"dtype": "bfloat16"}, "float32", torch.float32),
        ({"dtype": "float16"}, "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(load: Load, declared: dict[str, Any], asked: str, expected: torch.dtype) -> None:
    assert load(LLAMA, asked, **declared).dtype == expected


@pytest.mark.parametrize("base", [LLAMA, architecture("Mistral"), architecture("Qwen2"), architecture("Qwen3")])
def test_layers_that_all_see_everything_are_let_through(load: Load, base: dict[str, Any]) -> None:
    assert load(base, layer_types=["full_attention"] * 4) == load(base)


def test_float16_is_served_as_bfloat16_with_a_warning(
    load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load(LLAMA, dtype="float16").dtype == torch.bfloat16
    note_precision(tmp_path, "auto")
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "float16" in record.getMessage()
    assert "float32" in record.getMessage()
    caplog.clear()
    assert load(LLAMA, "float32", dtype="float16").dtype == torch.float32
    note_precision(tmp_path, "float32")
    assert not caplog.records


def test_dtype_of_the_weights_when_none_is_declared(save_checkpoint: Any, edit_config: Any) -> None:
    path = save_checkpoint("llama", dtype=torch.bfloat16)
    edit_config(path, dtype=...)
    assert load_model_config(path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("entries", "max_model_len"),
    [
        ({"rope_parameters": YARN}, 512),
        ({"rope_parameters": YARN, "max_position_embeddings": 1024}, 1024),
        ({"rope_parameters": LINEAR}, 512),
    ],
)
def test_context(load: Load, entries: dict[str, Any], max_model_len: int) -> None:
    assert load(LLAMA, **entries).max_model_len == max_model_len


@pytest.mark.parametrize(
    ("name", "entries", "windows"),
    [
        ("Mistral", {"sliding_window": 50}, [50] * 4),
        ("Mistral", {"sliding_window": None}, [None] * 4),
        ("Mistral", {"sliding_window": 256}, [None] * 4),
        ("Mistral", {"max_position_embeddings": 9000}, [4096] * 4),
        ("Qwen2", {"sliding_window": 50}, [None] * 4),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 3}, [None, None, None, 50]),
        ("Qwen3", {"use_sliding_window": True, "sliding_window": 50}, [None] * 4),
        (
            "Qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 50,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            [50, None, 50, None],
        ),
        ("Gemma2", {"sliding_window": 50}, [50, None, 50, None]),
        ("Gemma2", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [None] * 4),
        ("Gemma3", {"sliding_window": 50}, [50] * 4),
        ("Gemma3", {"sliding_window": 50, "sliding_window_pattern": 3}, [50, 50, None, 50]),
        ("Phi3", {}, [None] * 4),
        ("Phi3", {"sliding_window": 50}, [50] * 4),
        ("SmolLM3", {"sliding_window": 50}, [None] * 4),
        ("SmolLM3", {"sliding_window": 50, "use_sliding_window": True}, [None, None, None, 50]),
        (
            "SmolLM3",
            {
                "sliding_window": 50,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2,
            },
            [50, 50, None, None],
        ),
    ],
)
def test_sliding_windows(load: Load, name: str, entries: dict[str, Any], windows: list[int | None]) -> None:
    assert load(architecture(name), **entries).sliding_windows == tuple(windows)


def test_gemma_2(load: Load) -> None:
    config = load(architecture("Gemma2"), query_pre_attn_scalar=64, hidden_act="gelu")
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert config.attention_scales == (0.125,) * 4
    assert (config.embedding_scale, config.hidden_act) == (8.0, "gelu_pytorch_tanh")
    assert config.tie_word_embeddings
    config = load(architecture("Gemma2"), attn_logit_softcapping=None, final_logit_softcapping=7)
    assert (config.attention_softcap, config.logit_softcap) == (None, 7.0)


def test_the_scale_of_embeddings_is_rounded_to_the_dtype(load: Load) -> None:
    assert load(architecture("Gemma3"), "bfloat16", hidden_size=3072).embedding_scale == 55.5


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            }
        },
    ],
)
def test_layers_of_gemma_3_rotate_as_their_kind_does(load: Load, entries: dict[str, Any]) -> None:
    """In the spelling of transformers 4 and 5."""
    local, full = RopeConfig(16, 2e3), RopeConfig(16, 5e5, 8.0)
    assert load(architecture("Gemma3"), sliding_window_pattern=2, **entries).ropes == (local, full, local, full)


def test_defaults_of_gemma_3_s_rotation(load: Load) -> None:
    assert load(architecture("Gemma3"), sliding_window_pattern=4).ropes == (
        *[RopeConfig(16, 1e4)] * 3,
        RopeConfig(16, 1e6),
    )


def test_layers_of_smollm3_that_do_not_rotate(load: Load) -> None:
    rope, unrotated = RopeConfig(16, 2e6), no_rotation(16)
    assert load(architecture("SmolLM3")).ropes == (rope, rope, rope, unrotated)
    assert load(architecture("SmolLM3"), no_rope_layers=[0, 1, 0, 1]).ropes == (unrotated, rope) * 2


def test_experts(load: Load) -> None:
    experts = load(architecture("Mixtral")).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.intermediate_size) == (8, 2, 96)
    config = load(
        architecture("Qwen3Moe"), num_experts=8, moe_intermediate_size=32, mlp_only_layers=[2], sliding_window=0
    )
    assert config.experts is not None
    assert (config.experts.count, config.experts.per_token, config.experts.shared_size) == (8, 8, 0)
    assert config.experts.layers == (True, True, False, True)
    assert load(LLAMA).experts is None


def test_layers_with_experts_of_deepseek(load: Load) -> None:
    experts = load(LATENT | V3, num_hidden_layers=6, first_k_dense_replace=2, moe_layer_freq=2).experts
    assert experts is not None
    assert experts.layers == (False, False, True, False, True, False)
    assert (experts.shared_size, experts.normalizes_weights) == (24, True)
    assert experts.router == RouterSwitches(num_groups=4, groups_per_token=2, has_independent_scores=True, scale=2.5)
    greedy = load(LATENT | V2, n_group=1, topk_group=1, n_shared_experts=None).experts
    assert greedy is not None
    assert (greedy.router, greedy.shared_size) == (RouterSwitches(has_independent_scores=False), 0)
    assert load(LATENT | V3, n_routed_experts=None).experts is None


def test_scores_of_yarn_grow_by_its_magnitude(load: Load) -> None:
    plain, scaled = (load(LATENT | V3, rope_scaling=YARN | entries) for entries in ({}, {"mscale_all_dim": 1.0}))
    assert plain.attention_scales == (24**-0.5,) * 4
    assert scaled.attention_scales[0] == pytest.approx(24**-0.5 * (0.1 * math.log(4.0) + 1) ** 2)


def test_opt(load: Load) -> None:
    config = load(OPT, layerdrop=0.1, dropout=0.1, init_std=0.02)
    assert (config.hidden_size, config.embedding_size, config.intermediate_size) == (64, 64, 96)
    assert (config.hidden_act, config.max_model_len, config.ropes) == ("relu", 128, ())
    config = load(OPT, word_embed_proj_dim=32, do_layer_norm_before=False)
    assert config.embedding_size == 32
    assert config.opt == OPTSwitches(embedding_size=32, norm_before=False, final_norm=False, norms_have_weights=True)


HARMLESS = {
    "use_cache": True,
    "initializer_range": 0.02,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "transformers_version": "4.40.0",
    "_name_or_path": "somewhere",
    "pretraining_tp": 1,
    "quantization_config": None,
    "final_logit_softcapping": None,
    "use_mrope": False,
}


def test_what_changes_no_forward_pass_is_let_through(load: Load) -> None:
    assert load(LLAMA, **HARMLESS) == load(LLAMA)


LATENT = LLAMA | {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
V2 = {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None}
V3 = {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}
UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (LLAMA, {"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
    "no architecture": (LLAMA, {"architectures": None, "model_type": "own"}, "architectures"),
    "quantization": (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "looks ahead": (LLAMA, {"is_causal": False}, "is_causal must be true: only models that embed"),
    "looks ahead, null": (GPT2, {"is_causal": None}, "is_causal must be true"),
    "unknown entry": (LLAMA, {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping = 30.0"),
    "another family's entry": (LLAMA, {"sliding_window": 64}, "sliding_window"),
    "window that layers contradict": (
        architecture("Mistral"),
        {"layer_types": ["full_attention"] * 4, "sliding_window": 64},
        "layer_types",
    ),
    "llama by layer": (LLAMA, {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "layer_types"),
    "mistral by layer": (architecture("Mistral"), {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "too few kinds of llama's": (LLAMA, {"layer_types": ["full_attention"] * 3}, "layer_types"),
    "bias that qwen2 has not": (architecture("Qwen2"), {"attention_bias": True}, "attention_bias"),
    "activation": (LLAMA, {"hidden_act": "xielu"}, "hidden_act"),
    "rope type": (LLAMA, {"rope_scaling": {"type": "spiral", "factor": 2.0}}, "type must be one of"),
    "long rope without factors": (LLAMA, {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "short_factor must be"),
    "rope type, new": (LLAMA, {"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type must be one"),
    "rope parameter": (LLAMA, {"rope_parameters": LINEAR | {"mrope_section": [1, 2]}}, "mrope_section"),
    "rope by layer": (LLAMA, {"rope_parameters": {"full_attention": LINEAR}}, "full_attention"),
    "partly rotated": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "partly rotated, new": (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    "llama3 without factors": (LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    "layer kind": (architecture("Qwen3"), {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    "too few layer kinds": (architecture("Qwen3"), {"layer_types": ["full_attention"]}, "layer_types"),
    "window that is off": (architecture("Qwen3"), {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "cross attention": (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    "encoder-decoder": (LLAMA, {"is_encoder_decoder": True}, "is_encoder_decoder"),
    "dtype": (LLAMA, {"dtype": "float64"}, "float64"),
    "no heads": (LLAMA, {"num_attention_heads": 0}, "num_attention_heads"),
    "uneven heads": (LLAMA, {"num_key_value_heads": 3}, "num_key_value_heads"),
    "odd head size": (LLAMA, {"head_dim": 15}, "head_dim"),
    "shape of a wrong type": (LLAMA, {"hidden_size": "64"}, "hidden_size"),
    "shape that is a boolean": (LLAMA, {"vocab_size": True}, "vocab_size"),
    "eps": (LLAMA, {"rms_norm_eps": -1}, "rms_norm_eps"),
    "flag": (LLAMA, {"mlp_bias": "yes"}, "mlp_bias"),
    "gemma that looks ahead": (architecture("Gemma3"), {"use_bidirectional_attention": True}, "use_bidirectional"),
    "gemma 3 with limited scores": (architecture("Gemma3"), {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    "gemma's window": (architecture("Gemma2"), {"sliding_window": 0}, "sliding_window"),
    "gemma's scale": (architecture("Gemma2"), {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
    "rope of an unknown kind": (
        architecture("Gemma3"),
        {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}},
        "chunked_attention",
    ),
    "too few long factors": (
        architecture("Phi3"),
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
        "long_factor must be a list of head_dim / 2 = 8",
    ),
    "phi3's other ropes": (architecture("Phi3"), {"rope_parameters": LINEAR}, "rope_parameters is not supported"),
    "phi3, partly rotated": (architecture("Phi3"), {"partial_rotary_factor": 0.75}, "partial_rotary_factor"),
    "bias that phi3 has not": (architecture("Phi3"), {"attention_bias": True}, "attention_bias"),
    "window that olmo2 has not": (architecture("Olmo2"), {"sliding_window": 64}, "sliding_window"),
    "olmo2 by layer": (architecture("Olmo2"), {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    "too few rotations": (architecture("SmolLM3"), {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    "rotations that are no flags": (architecture("SmolLM3"), {"no_rope_layers": [2] * 4}, "no_rope_layers"),
    "more experts than there are": (architecture("Mixtral"), {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    "experts without a number": (architecture("Qwen3Moe"), {}, "num_experts"),
    "windows that experts have not": (
        architecture("Qwen2Moe"),
        {"num_experts": 8, "use_sliding_window": True},
        "use_sliding_window",
    ),
    "v2's other routers": (LATENT | V2, {"topk_method": "noaux_tc"}, "topk_method must be greedy or group_limited"),
    "v3's other routers": (LATENT | V3, {"topk_method": "greedy"}, "topk_method must be noaux_tc"),
    "v3's other scores": (LATENT | V3, {"scoring_func": "softmax"}, "scoring_func must be sigmoid"),
    "weights that v2 does not normalize": (LATENT | V2, {"norm_topk_prob": True}, "norm_topk_prob must be false"),
    "uneven groups": (LATENT | V3, {"n_group": 3}, "n_group must divide 8 experts"),
    "more groups than there are": (LATENT | V3, {"topk_group": 5}, "topk_group must be at most n_group, 4"),
    "groups that hold too few": (LATENT | V3, {"topk_group": 1, "num_experts_per_tok": 3}, "n_group must divide"),
    "dense layers without a number": (LATENT | V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    "windows of compressed vectors": (LATENT | V3, {"sliding_window": 64}, "sliding_window"),
    "a choice of positions (DSA)": (LATENT | V3, {"index_topk": 2048}, "index_topk"),
    "uneven heads of opt": (OPT, {"num_attention_heads": 5}, "num_attention_heads"),
    "unknown entry of opt": (OPT, {"head_dim": 16}, "head_dim"),
    "missing shape": (GPT2, {"n_positions": None}, "n_positions"),
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_refused_by_name(load: Load, feature: str) -> None:
    base, entries, named = UNSUPPORTED[feature]
    with pytest.raises(ValueError, match=named):
        load(base, **entries)


def test_unknown_dtype_is_refused(load: Load) -> None:
    with pytest.raises(ValueError, match="'int8'"):
        load(LLAMA, "int8")


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_no_configuration(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model_config(tmp_path)

"""The configurations that the hub has of well-known models are read, entry by entry; none names what is not there."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.checkpoint.published_configs import (
    CONFIGS,
    LLAMA_4_SCOUT,
    PHI_3_MINI_128K,
    PHI_4_MINI,
)
from tokenloom.gpu_worker.checkpoint.files.config_reader import UnsupportedError
from tokenloom.gpu_worker.checkpoint.load_config import load_model_config
from tokenloom.gpu_worker.checkpoint.rope_config import QueryScaling, no_rotation

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

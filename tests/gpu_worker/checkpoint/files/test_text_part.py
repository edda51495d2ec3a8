"""The entries and tensors of the text model in a checkpoint that reads images too."""

import pytest

from tests.parity.vision_checkpoints import CONFIGS
from tokenloom.gpu_worker.checkpoint.files.text_part import (
    MediaSwitches,
    media_switches,
    text_entries,
    text_tensor,
    wrapper_of,
)


def test_a_text_model_is_its_own_text_part() -> None:
    values = {"architectures": ["LlamaForCausalLM"], "text_config": {"hidden_size": 3}, "image_token_id": 1}
    assert wrapper_of(values) is None
    assert text_entries(values) == values


@pytest.mark.parametrize(("kind", "text"), [("qwen2_vl", "qwen2"), ("llava", "llama"), ("gemma3", "gemma3_text")])
def test_a_class_is_known_by_its_type_too(kind: str, text: str) -> None:
    values = {name: value for name, value in CONFIGS[kind].items() if name != "architectures"}
    assert wrapper_of(values) == CONFIGS[kind]["architectures"][0]
    assert wrapper_of(values | {"auto_map": {"AutoModel": "odd.py"}}) is None
    assert text_entries(values)["model_type"] == text


def test_what_published_files_leave_out_is_that_of_the_class() -> None:
    # The text_config of llava-hf/llava-1.5-7b-hf states no size but that of the vocabulary.
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "vocab_size": 32064}
    entries = text_entries({"architectures": ["LlavaForConditionalGeneration"], "text_config": text})
    assert [entries[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")] == [4096, 32, 32064]


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, True),  # the default of Gemma 3's whole class
        ({"tie_word_embeddings": False}, {}, None),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}, False),
    ],
)
def test_either_level_ties_the_output_layer(outer: dict[str, bool], inner: dict[str, bool], tied: bool | None) -> None:
    """None: the entry is absent, so that the default of the text's own class counts."""
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": {"hidden_size": 8, **inner}, **outer}
    assert text_entries(values).get("tie_word_embeddings") is tied


def test_entries_beside_the_text_model_are_kept_unless_they_are_of_another_part() -> None:
    values = CONFIGS["llava"] | {"odd_feature": 1, "quantization_config": {"quant_method": "fp8"}, "hidden_size": 7}
    entries = text_entries(values)
    assert entries["odd_feature"] == 1
    assert entries["quantization_config"] == {"quant_method": "fp8"}
    assert entries["hidden_size"] == 64
    assert not {"vision_config", "image_token_index", "vision_feature_layer"} & entries.keys()


def test_what_is_written_into_the_entries_of_text_is_left_out_too() -> None:
    # As transformers 4.52 saves Qwen2.5-VL: all entries at both levels.
    both = {name: value for name, value in CONFIGS["qwen2_5_vl"].items() if name != "vision_config"}
    nested = both | {"model_type": "qwen2_5_vl_text", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    entries = text_entries(CONFIGS["qwen2_5_vl"] | {"text_config": nested})
    assert entries == text_entries(CONFIGS["qwen2_5_vl"]) | {"tie_word_embeddings": False}


def test_rotation_by_three_positions_is_the_ordinary_one() -> None:
    entries = text_entries(CONFIGS["qwen2_vl"])
    assert entries["rope_scaling"] == {"type": "default"}
    long = {"type": "yarn", "mrope_section": [2, 3, 3], "factor": 4, "original_max_position_embeddings": 64}
    assert text_entries(CONFIGS["qwen2_vl"] | {"rope_scaling": long})["rope_scaling"]["type"] == "yarn"


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.qweight", "lm_head.qweight"),
        ("model.layers.0.input_layernorm.weight", "model.layers.0.input_layernorm.weight"),
        ("model.visual.merger.norm.bias", None),
        ("visual.blocks.0.attn.qkv.weight", None),
        ("vision_tower.vision_model.embeddings.class_embedding", None),
        ("model.multi_modal_projector.linear_1.weight", None),
        ("image_newline", None),
        ("an_odd_part.weight", "an_odd_part.weight"),
    ],
)
def test_names_of_tensors(stored: str, name: str | None) -> None:
    assert text_tensor(stored) == name


def test_what_images_change_is_read_from_the_whole_configuration() -> None:
    found = {kind: media_switches(values) for kind, values in CONFIGS.items()}
    assert found["llava"] == found["pixtral"] == MediaSwitches()
    assert found["gemma4_e2b"] == MediaSwitches(kinds=("image", "video"))
    assert found["llava_next"] is None
    assert found["gemma3"] == MediaSwitches(seen_whole="all")
    assert found["gemma4_26b_a4b"] == MediaSwitches(seen_whole="sliding", kinds=("image", "video"))
    films = ("image", "video")
    assert found["qwen2_5_vl"] == MediaSwitches(axes=(0, 0, 1, 1, 1, 2, 2, 2), kinds=films)
    assert found["qwen3_vl_moe"] == MediaSwitches(2, axes=(0, 1, 2) * 4, kinds=films)
    # Its axes are of the half of a head that rotates.
    assert found["qwen3_5"] == MediaSwitches(axes=(0, 1, 2, 0), kinds=films)
    assert media_switches({"architectures": ["Qwen3ForCausalLM"]}) is None
    assert media_switches({"model_type": "qwen2_audio"}) == MediaSwitches(kinds=("audio",))
    stated = {"architectures": ["Qwen3VLForConditionalGeneration"]}
    published = media_switches(stated | {"text_config": {"rope_scaling": {"mrope_section": [24, 20, 20]}}})
    assert published == media_switches(stated)  # the defaults of the class
    assert published == MediaSwitches(4, axes=((0, 1, 2) * 20 + (0,) * 4), kinds=films)

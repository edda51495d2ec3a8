"""The accounting of configuration entries."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from tokenloom.gpu_worker.checkpoint.files.architectures import CLASS_OF_TYPE, WITHOUT_MODULES
from tokenloom.gpu_worker.checkpoint.files.config_reader import (
    ConfigReader,
    architecture_of,
    causal_classes,
    weight_files,
)


def test_what_was_taken_is_not_refused() -> None:
    reader = ConfigReader({"a": 1, "b": 2.5, "c": True}, "config.json")
    assert (reader.take_int("a"), reader.take_float("b"), reader.take_bool("c", False)) == (1, 2.5, True)
    reader.refuse_rest()


def test_the_rest_is_named_with_its_values() -> None:
    reader = ConfigReader({"a": 1, "soft_cap": 30.0, "alpha": "x"}, "config.json")
    reader.take("a")
    with pytest.raises(ValueError, match=r'config\.json: not supported: alpha = "x", soft_cap = 30\.0'):
        reader.refuse_rest()


def test_private_harmless_and_off_entries_pass() -> None:
    values = {"_private": 1, "known": 2, "null": None, "off": False, "none": [], "empty": {}}
    ConfigReader(values, "config.json", frozenset({"known"})).refuse_rest()


@pytest.mark.parametrize("name", ["is_causal", "llama.attention.causal"])
def test_an_entry_that_is_on_where_it_is_absent_asks_by_being_off(name: str) -> None:
    ConfigReader({name: True}, "config.json").refuse_rest()
    for value in (False, None, 0, []):
        with pytest.raises(ValueError, match=f"not supported: {name} = "):
            ConfigReader({name: value}, "config.json").refuse_rest()


def test_zero_is_a_value_not_off() -> None:
    with pytest.raises(ValueError, match="cap = 0"):
        ConfigReader({"cap": 0}, "config.json").refuse_rest()


def test_null_takes_the_default() -> None:
    reader = ConfigReader({"a": None}, "config.json")
    assert reader.take_int("a", 7) == reader.take_int("missing", 7) == 7
    assert reader.take("a", 7) is None


def test_a_flag_that_is_null_is_off() -> None:
    reader = ConfigReader({"a": None}, "config.json")
    assert (reader.take_bool("a", True), reader.take_bool("missing", True)) == (False, True)


def test_a_nested_object_has_its_own_accounting() -> None:
    reader = ConfigReader({"rope": {"x": 1}}, "config.json")
    nested = reader.take_object("rope")
    reader.refuse_rest()
    assert nested is not None
    with pytest.raises(ValueError, match=r"config\.json: rope: not supported: x = 1"):
        nested.refuse_rest()


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, [1]])
def test_not_a_positive_integer(value: object) -> None:
    with pytest.raises(ValueError, match="size must be a positive integer, found"):
        ConfigReader({"size": value}, "config.json").take_int("size")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "1", True])
def test_not_a_positive_number(value: object) -> None:
    with pytest.raises(ValueError, match="eps must be a positive number, found"):
        ConfigReader({"eps": value}, "config.json").take_float("eps")


def test_missing_without_a_default() -> None:
    with pytest.raises(ValueError, match="size must be a positive integer, found nothing"):
        ConfigReader({}, "config.json").take_int("size")


def test_not_an_object() -> None:
    with pytest.raises(ValueError, match="rope must be an object"):
        ConfigReader({"rope": [1]}, "config.json").take_object("rope")


CODE = {"auto_map": {"AutoModelForCausalLM": "code.OwnForCausalLM"}}


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "llama"}, "Qwen2ForCausalLM"),
        ({"architectures": ["LlamaModel"], "model_type": "llama"}, "LlamaModel"),
        ({"architectures": ["OwnForCausalLM", "LlamaForCausalLM"], "model_type": "own"}, "LlamaForCausalLM"),
        ({"architectures": ["LLaMAForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "mistral"}, "MistralForCausalLM"),
        ({"architectures": [], "model_type": "xlm-roberta"}, "XLMRobertaModel"),
        ({"model_type": "gemma3_text"}, "Gemma3ForCausalLM"),
        ({"model_type": "phi"}, "PhiForCausalLM"),
        ({"architectures": ["OwnForCausalLM"], "model_type": "llama"} | CODE, "OwnForCausalLM"),
        ({"architectures": ["OwnForCausalLM"], "model_type": "own"}, "OwnForCausalLM"),
    ],
)
def test_the_class_is_the_first_known_entry_or_that_of_the_type(entries: dict[str, Any], name: str) -> None:
    assert architecture_of(entries, "config.json") == name


@pytest.mark.parametrize(
    "entries", [{}, {"architectures": 5}, {"architectures": []}, {"model_type": "own"}, {"model_type": "llama"} | CODE]
)
def test_no_class_and_no_known_type(entries: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="architectures must name the model's class"):
        architecture_of(entries, "config.json")


def test_types_stand_for_the_classes_of_transformers() -> None:
    """As models/auto/modeling_auto.py of transformers maps them; its table is read from the source."""
    found = {kind: name for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(name, str)}
    assert causal_classes().items() >= found.items()
    for kind, name in CLASS_OF_TYPE.items():
        assert (
            name in WITHOUT_MODULES
            or name == (MODEL_MAPPING_NAMES if name.endswith("Model") and kind != "gpt2" else found)[kind]
        )


@pytest.mark.parametrize("pattern", ["model-{:05}-of-00003.safetensors", "pytorch_model-{:05}-of-00003.bin"])
def test_shards_are_found_without_their_index(pattern: str, tmp_path: Path) -> None:
    names = [pattern.format(number) for number in (1, 2, 3)]
    for name in [*names, "training_args.bin", "adapter-00001-of-00001.safetensors"]:
        (tmp_path / name).touch()
    assert [file.name for file in weight_files(tmp_path)] == names
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=f"{names[0]}, and not {names[1]}: download the missing part"):
        weight_files(tmp_path)

"""The accounting of configuration entries."""

import pytest

from tokenloom.gpu_worker.checkpoint.files.config_reader import ConfigReader


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


def test_zero_is_a_value_not_off() -> None:
    with pytest.raises(ValueError, match="cap = 0"):
        ConfigReader({"cap": 0}, "config.json").refuse_rest()


def test_null_takes_the_default() -> None:
    reader = ConfigReader({"a": None}, "config.json")
    assert reader.take_int("a", 7) == reader.take_int("missing", 7) == 7
    assert reader.take("a", 7) is None


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

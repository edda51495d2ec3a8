"""Tests how adapters to load at start are written."""

import pytest

from tokenloom.engine_core.data.lora import LoraConfig


def test_names_and_paths_in_both_forms() -> None:
    vllm = '{"name": "c", "path": "/c", "base_model_name": "m"}'
    given = ("a=/a", *vllm.split(","), "b=/b=2")  # as the commas of an option divide it
    assert LoraConfig(enable=True, modules=given).named_paths() == [("a", "/a"), ("c", "/c"), ("b", "/b=2")]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("a", "'a' must be name=path"),
        ("=/a", "the name must be 1 to"),
        ("a:b=/a", "the name must be 1 to"),
        ('{"name": "a"}', 'must be name=path or {"name"'),
        ('{"name": "a", "path": "/a,b"}', "without commas"),
        ("{name", "not JSON"),
    ],
)
def test_what_is_refused(given: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        LoraConfig(enable=True, modules=(given,)).named_paths()
    with pytest.raises(ValueError, match="needs enable_lora"):
        LoraConfig(modules=(given,)).named_paths()

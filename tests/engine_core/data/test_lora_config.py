"""Tests how adapters to load at start are written."""

import re
import time
from pathlib import Path

import pytest

from tokenloom.engine_core.data.lora import CONFIG, WEIGHTS, LoraConfig, pattern_value, read_adapter_files, read_rank


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


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "q_proj",
            ".*q_proj",
            r"layers\.(0|1)\.self_attn.(q|k)_proj",
            "(?!.*mlp).*proj",
            "(?=.*mlp).*proj",
            "[a-z_]+",
        ),
        *(r"model\..*\d+.*", "^model.*", "(a?){3,5}b", "(?:lm_head|up_proj)", r"layers\.\d{1,2}\..*", "(.*?)proj"),
        *(
            "(^model)?.*head",
            r"\bq_proj",
            "(ab|aa)*?b",
            "",
            "a||b",
            "(|a)*",
            "(a{0,3}){2}b",
            "[^.]*",
            "(a+)+b",
            "x)|(y",
        ),
    ],
)
def test_patterns_fit_what_they_fit_in_peft(pattern: str) -> None:
    names = [f"model.layers.{i}.{kind}" for i in (0, 9, 31) for kind in ("self_attn.q_proj", "mlp.up_proj")]
    for name in (*names, "lm_head", "aab", "x.aab", "aaaab", ""):
        expected = re.match(rf"(.*\.)?({pattern})$", name) is not None
        assert pattern_value({"rank_pattern": {pattern: True}}, "rank_pattern", name, False) == expected, name


# Python would try more ways to match each of these than a second has nanoseconds.
@pytest.mark.parametrize("pattern", ["([a-z._0-9]+)+!", "(.*.*.*.*.*.*.*.*.*.*)*x", "((.?){9999}){9999}!"])
def test_a_pattern_of_many_ways_takes_no_time(pattern: str) -> None:
    begin = time.thread_time()
    config = {"r": 2, "rank_pattern": {pattern: 2, ".*": 4}}
    assert read_rank(config, 8) == 4
    assert pattern_value(config, "rank_pattern", "model.layers.0.self_attn.q_proj", 2) == 4
    assert time.thread_time() - begin < 5


def test_a_pattern_that_takes_too_long_is_refused() -> None:
    with pytest.raises(ValueError, match="takes too many steps to match"):
        pattern_value({"rank_pattern": {"((.?){9999}){9999}!": 2}}, "rank_pattern", "a" * 5000, 2)


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("(?i)up_proj", "is no regular expression: global flags"),
        ("a{100000000000000000000}", "is no regular expression: the repetition number is too large"),
        ("(" * 5000 + ")" * 5000, "is no regular expression: maximum recursion"),
        (r"(?P<kind>up)_proj|(?P=kind)", "has groupref, which is not supported"),
    ],
)
def test_a_pattern_that_cannot_be_matched_is_refused(pattern: str, wanted: str) -> None:
    config = {"r": 2, "rank_pattern": {pattern: 2}}
    with pytest.raises(ValueError, match=wanted):
        pattern_value(config, "rank_pattern", "x", read_rank(config, 8))


def test_deeply_nested_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text("[" * 200_000)
    (tmp_path / WEIGHTS).touch()
    with pytest.raises(ValueError, match="not JSON: maximum recursion"):
        read_adapter_files(tmp_path)

"""From options to flags."""

from pathlib import Path

import pytest
import typer

from tokenloom.checkpoint import DEMO_MODEL
from tokenloom.cli.mesh.engine_choices import Dtype
from tokenloom.cli.mesh.flags import flags, model_directory, setting_flags


def test_values_become_kebab_case_flags() -> None:
    assert flags(max_model_len=512, dtype=Dtype.FLOAT32, strict=True) == (
        *("--max-model-len", "512", "--dtype", "float32"),
        "--strict",
    )


def test_what_was_not_given_is_left_to_the_service() -> None:
    assert flags(max_model_len=None, strict=False) == ()
    assert flags(drain_timeout=0.0) == ("--drain-timeout", "0.0")


def test_what_was_given_is_told_even_when_it_is_no() -> None:
    settings = {"kv_events": True, "strict": False, "names": ["a", "b"], "max-logprobs": -1}
    assert setting_flags(settings) == ("--kv-events", "--no-strict", "--names=a,b", "--max-logprobs=-1")


def test_the_demo_model_has_its_own_name() -> None:
    assert model_directory("tokenloom-demo", None) == (DEMO_MODEL.resolve(), "tokenloom-demo")


def test_a_directory_is_served_under_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    assert model_directory(str(tmp_path / "llama"), None)[1] == "llama"
    assert model_directory(str(tmp_path / "llama"), "other")[1] == "other"


def test_a_model_that_is_not_there_is_a_usage_error() -> None:
    with pytest.raises(typer.BadParameter, match="no such directory"):
        model_directory("./nowhere", None)

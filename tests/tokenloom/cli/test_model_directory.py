"""The model that a command is given."""

from pathlib import Path

import pytest
import typer

from tokenloom.cli.model_directory import model_directory
from tokenloom.model_files.model_path import DEMO_MODEL


def test_the_demo_model_has_its_own_name() -> None:
    assert model_directory("tokenloom-demo", None) == (DEMO_MODEL.resolve(), "tokenloom-demo")
    assert model_directory("tokenloom-picture", None) == ((DEMO_MODEL / "picture").resolve(), "tokenloom-picture")


def test_a_directory_is_served_under_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    assert model_directory(str(tmp_path / "llama"), None)[1] == "llama"
    assert model_directory(str(tmp_path / "llama"), "other")[1] == "other"


def test_a_model_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exited:
        model_directory("./nowhere", None)
    assert exited.value.exit_code == 2
    assert capsys.readouterr().err.startswith("Error: nowhere does not exist: give a checkpoint directory")

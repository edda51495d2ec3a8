"""The model that a command is given."""

from pathlib import Path

import pytest
import typer
from huggingface_hub import constants
from typer.testing import CliRunner

from tests.hub_mirror import HubMirror
from tokenloom.cli.main import app
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


def test_a_hub_that_does_not_answer_is_no_fault_of_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line names the hub, the variable that chooses it, and the cause; the status is that of a failure."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with HubMirror(DEMO_MODEL).used() as mirror:
        pass  # it ends here, and its port refuses connections
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", mirror.url)
    result = CliRunner().invoke(app, ["serve", "org/other"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: model 'org/other': no such directory, and it cannot be downloaded from {mirror.url} (Connection "
        "refused): check network and proxy; HF_ENDPOINT names this hub\n"
    )

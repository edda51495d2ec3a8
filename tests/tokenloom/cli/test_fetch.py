"""``tokenloom fetch``: one download, for which other processes can wait."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.hub_mirror import COMMIT, HubMirror
from tokenloom.cli.main import app
from tokenloom.model_files import model_path
from tokenloom.model_files.model_path import DEMO_MODEL

runner = CliRunner()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubMirror]:
    """A mirror of the hub that has the demo model under the name org/name, for those who have the token."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with HubMirror(DEMO_MODEL, token="hf_secret").used() as served:
        yield served


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    return ["fetch", "org/name", "--into", str(tmp_path / "models")]


def test_it_prints_the_directory_of_the_revision(mirror: HubMirror, arguments: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, [*arguments, "--revision", "v1"])
    assert result.exit_code == 0, result.output
    path = Path(result.stdout.strip())
    assert path == tmp_path / "models" / "models--org--name" / "snapshots" / COMMIT
    assert (path / "model.safetensors").read_bytes() == (DEMO_MODEL / "model.safetensors").read_bytes()


def test_only_a_cache_with_all_needed_files_ends_the_wait(mirror: HubMirror, arguments: list[str]) -> None:
    text_only = runner.invoke(app, [*arguments, "--no-weights"])
    assert text_only.exit_code == 0
    assert runner.invoke(app, [*arguments, "--no-weights", "--wait", "0"]).stdout == text_only.stdout
    too_early = runner.invoke(app, [*arguments, "--wait", "0"])
    assert too_early.exit_code == 1
    assert "the cache does not hold all of its files" in too_early.stderr


def test_the_wait_ends_when_another_process_has_fetched_the_model(
    mirror: HubMirror, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch_meanwhile(seconds: float) -> None:
        model_path.download("org/name", cache=model_path.HubCache(Path(arguments[3])))

    monkeypatch.setattr("tokenloom.cli.fetch.time.sleep", fetch_meanwhile)
    result = runner.invoke(app, [*arguments, "--wait", "60"])
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().endswith(COMMIT)


def test_a_path_needs_no_hub(tmp_path: Path) -> None:
    assert runner.invoke(app, ["fetch", str(DEMO_MODEL)]).stdout.strip() == str(DEMO_MODEL.resolve())
    assert runner.invoke(app, ["fetch", "tokenloom-demo"]).exit_code == 0


def test_two_revisions_are_a_mistake() -> None:
    assert runner.invoke(app, ["fetch", "org/name@v1", "--revision", "v2"]).exit_code == 2

"""What the pages say of files, commands and settings is there."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.reference import PAGES

ROOT = Path(__file__).parents[2]
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGES = {"tokenloom/service", "tokenloom/engine-cpu", "tokenloom/engine-cuda"}
PAGE_IDS = [str(path.relative_to(ROOT)) for path in MARKDOWN]


@pytest.mark.parametrize("page", MARKDOWN, ids=PAGE_IDS)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", MARKDOWN, ids=PAGE_IDS)
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "services|engine_core|gpu_worker|tokenloom|protos|tests|examples|k8s|observability"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text())) - IMAGES
    for name in named:
        assert (ROOT / name).exists() or list(ROOT.glob(f"{name}*")), name


@pytest.mark.parametrize("page", MARKDOWN, ids=PAGE_IDS)
def test_commands_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:`|^\$ )make ([a-z-]+)", text, re.MULTILINE):
        assert target in targets, target
    commands = get_command(app).commands  # type: ignore[attr-defined]
    for command in re.findall(r"(?:`|\$ (?:\.venv/bin/)?)tokenloom ([a-z][a-z-]*)\b", text):
        assert command in commands, command


@pytest.mark.parametrize("name", PAGES)
def test_pages_from_the_code_are_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run `make docs`"


def test_the_help_lists_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    for command in get_command(app).commands:  # type: ignore[attr-defined]
        assert command in output

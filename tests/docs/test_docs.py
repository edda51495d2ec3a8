"""What the pages say of files, commands and settings is there."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tokenloom.cli.main import app
from tokenloom.reference.__main__ import PAGES, grpc_pages

ROOT = Path(__file__).parents[2]
MARKDOWN = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
IMAGES = {"tokenloom/service", "tokenloom/engine-cpu", "tokenloom/engine-cuda"}
PAGE_IDS = [str(path.relative_to(ROOT)) for path in MARKDOWN]


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


@pytest.mark.parametrize("page", MARKDOWN, ids=PAGE_IDS)
def test_every_page_begins_with_a_title(page: Path) -> None:
    assert page.read_text().startswith("# "), "an emptied page would pass every other test"


def test_the_readme_links_every_page_that_people_write() -> None:
    linked = set(re.findall(r"\]\((docs/[\w/-]+\.md)", (ROOT / "README.md").read_text()))
    written = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if "grpc" not in path.parts}
    assert written - {"docs/index.md"} <= linked


def test_pages_that_the_code_names_exist() -> None:
    folders = ("tokenloom", "services", "engine_core", "gpu_worker", "protos", "benchmarks", "examples", "k8s", "tools")
    paths = [
        path for folder in folders for suffix in (".py", ".proto", ".yaml", ".sh") for path in _files(folder, suffix)
    ]
    for path in [*paths, ROOT / "docker-compose.yml", ROOT / "Makefile", ROOT / "Dockerfile"]:
        for name in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", path.read_text()):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def _files(folder: str, suffix: str) -> list[Path]:
    return [path for path in (ROOT / folder).rglob(f"*{suffix}") if not path.is_symlink()]


@pytest.mark.parametrize("name", PAGES)
def test_pages_from_the_code_are_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), "run `make docs`"


def test_pages_of_the_grpc_contracts_are_current() -> None:
    pages = grpc_pages()
    folder = ROOT / "docs" / "reference" / "grpc"
    assert {f"reference/grpc/{path.name}" for path in folder.iterdir()} == pages.keys()
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, f"{name}: run `make docs`"


def test_the_help_lists_every_command() -> None:
    output = CliRunner().invoke(app, ["--help"]).output
    for command in get_command(app).commands:  # type: ignore[attr-defined]
        assert command in output

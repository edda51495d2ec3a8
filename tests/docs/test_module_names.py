"""Pages, comments and docstrings name modules that are there, also after one was renamed, moved or joined."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .markdown_page import DOCS, ROOT, markdown_files

PRODUCT = ("engine_core", "gpu_worker", "services", "tokenloom", "observability", "tools", "examples")
MOVED = DOCS / "understand" / "moved.md"
PAGES = [path for path in markdown_files() if path not in (MOVED, ROOT / "CHANGELOG.md")]
_NAMED = re.compile(r"`((?:\w+/)*\w+\.py)`")
_COMMAND = re.compile(r"python3? -m ((?:tokenloom|tests|tools)(?:\.[a-z]\w*)+)")


def files(folder: str) -> list[Path]:
    """Return the modules of a folder; ``tokenloom/`` has links to the others, which are not followed."""
    return [path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts]


def names(of: tuple[str, ...] = (*PRODUCT, "tests", "benchmarks")) -> set[str]:
    """Return the paths of modules from the root, and the ends of these paths."""
    paths = [path.relative_to(ROOT).parts for folder in of for path in files(folder)]
    return {"/".join(parts[start:]) for parts in paths for start in range(len(parts))}


ALL, OF_PRODUCT = names(), names(PRODUCT)


def unknown(text: str) -> list[str]:
    """Return the modules that a page names and that are not there. A bare name is one of the product or of a test:
    programs of the tests may bear a name that the product no longer has."""
    known = {name for name in ALL if "/" in name or name.startswith("test_")} | OF_PRODUCT
    return [name for name in _NAMED.findall(text) if name not in known]


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_pages_name_modules_that_are_there(page: Path) -> None:
    assert unknown(page.read_text()) == []


def test_a_name_that_no_module_has_is_found() -> None:
    assert unknown("`scheduling/scheduler.py`, `core.py`, `no_such.py`, `core/no_such.py`") == [
        "no_such.py",
        "core/no_such.py",
    ]
    assert unknown("`conftest.py`")  # of the tests alone


def test_commands_in_the_code_name_modules_that_are_there() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {module}"
        for folder in (*PRODUCT, "benchmarks")
        for path in files(folder)
        for module in _COMMAND.findall(path.read_text())
        if not is_module(module)
    ]
    assert found == []


def is_module(module: str) -> bool:
    """Return whether ``python -m`` finds a module, or this is the folder of a name to be filled in."""
    path = ROOT / module.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_a_command_of_no_module_is_found() -> None:
    assert is_module("tokenloom.reference")
    assert is_module("tokenloom.bench.engine.step_loop")
    assert not is_module("tokenloom.bench.engine.no_such")


def moves() -> Iterator[tuple[Path, Path]]:
    """Yield where each module that moved was, and where it is."""
    folder = ROOT
    for line in MOVED.read_text().splitlines():
        if line.startswith("## "):
            folder = ROOT / line.removeprefix("## ")
        elif cells := re.fullmatch(r"\| (\w+\.py) \| `([\w/]+\.py)` \|", line):
            yield folder / cells[1], ROOT / cells[2]


def test_what_moved_is_in_its_new_place_and_not_in_its_old_one() -> None:
    found = list(moves())
    assert len(found) > 100
    assert [str(before) for before, _ in found if before.exists()] == []
    assert [str(after) for _, after in found if not after.is_file()] == []

"""Folders form layers: what a folder needs, it can be read after. No folder depends on itself through others.

Folder A depends on B if a file directly in A imports one directly in B; a folder and the folder in it are two. Imports
in functions and those for type checking count as well.
"""

from pathlib import Path

import pytest

from tools.figures.imports import cycles, import_graph
from tools.figures.rooms import folder_graph
from tools.figures.source_tree import Source, SourceTree


@pytest.fixture(scope="module")
def product() -> list[Source]:
    return SourceTree(Path(__file__).parent.parent).product


def needs(graph: dict[str, set[str]], folder: str) -> set[str]:
    """Return the folders that ``folder`` needs, at one step or several."""
    found: set[str] = set()
    ahead = [folder]
    while ahead:
        new = graph.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


def test_no_folder_needs_one_that_needs_it(product: list[Source]) -> None:
    graph = folder_graph(product)
    needed = {folder: needs(graph, folder) for folder in graph}
    assert len(needed) > 50
    circles = {folder: [other for other in others if folder in needed[other]] for folder, others in needed.items()}
    assert {folder: others for folder, others in circles.items() if others} == {}


def test_no_module_needs_one_that_needs_it(product: list[Source]) -> None:
    assert cycles(import_graph(product)) == []


def test_a_circle_through_a_third_folder_is_found() -> None:
    sources = [
        Source("services/a/one.py", "from ..b.two import x\n"),
        Source("services/b/two.py", "def f():\n    from ..c.three import x\n"),
        Source("services/c/three.py", "from ..a.one import y\n"),
        *(Source(f"services/{name}/__init__.py", "") for name in "abc"),
    ]
    assert needs(folder_graph(sources), "services/a") == {"services/a", "services/b", "services/c"}

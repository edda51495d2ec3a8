"""Folders form layers: what a folder needs, it can be read after. No folder depends on itself through others.

Folder A depends on B if a file directly in A imports one directly in B; a folder and the folder in it are two. Imports
in functions and those for type checking count as well.
"""

from pathlib import Path

import pytest

from tools.figures.imports import cycles, import_graph
from tools.figures.rooms import folder_graph
from tools.figures.source_tree import Source, SourceTree

PRODUCT = SourceTree(Path(__file__).parent.parent).product
GRAPH = folder_graph(PRODUCT)


def needs(graph: dict[str, set[str]], folder: str) -> set[str]:
    """Return the folders that ``folder`` needs, at one step or several."""
    found: set[str] = set()
    ahead = [folder]
    while ahead:
        new = graph.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found


@pytest.mark.parametrize("folder", sorted(GRAPH))
def test_no_folder_needs_one_that_needs_it(folder: str) -> None:
    assert [other for other in sorted(needs(GRAPH, folder)) if folder in needs(GRAPH, other)] == []


def test_no_module_needs_one_that_needs_it() -> None:
    assert cycles(import_graph(PRODUCT)) == []


def test_a_circle_through_a_third_folder_is_found() -> None:
    sources = [
        Source("services/a/one.py", "from ..b.two import x\n"),
        Source("services/b/two.py", "def f():\n    from ..c.three import x\n"),
        Source("services/c/three.py", "from ..a.one import y\n"),
        *(Source(f"services/{name}/__init__.py", "") for name in "abc"),
    ]
    assert needs(folder_graph(sources), "services/a") == {"services/a", "services/b", "services/c"}

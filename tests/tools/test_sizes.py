"""Folders, files and functions of a made tree."""

from pathlib import Path

import pytest

from tools.figures.sizes import FlatFolder, FolderSize, Sizes, measure
from tools.figures.source_tree import SourceTree

_FUNCTIONS = """
@decorator
def long():
    def nested():
        return 1
    return nested


async def short(): ...
"""


@pytest.fixture
def sizes(tmp_path: Path) -> Sizes:
    files = {
        "engine_core/core.py": _FUNCTIONS,
        "engine_core/kv/blocks.py": "x = 1\n",
        "engine_core/kv/deep/pool.py": "x = 1\ny = 2\n",
        "tests/one/test_a.py": "",
        "tests/one/test_b.py": "",
        "tests/one/test_c.py": "x = 1\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return measure(SourceTree(tmp_path), flat_folders=2)


def test_a_folder_holds_what_is_in_the_folders_below_it(sizes: Sizes) -> None:
    assert sizes.folders == [
        FolderSize("engine_core", 3, 12),
        FolderSize("engine_core/kv", 2, 3),
        FolderSize("engine_core/kv/deep", 1, 2),
    ]
    assert (sizes.product.files, sizes.product.lines) == (3, 12)
    assert sizes.aside == [FolderSize("tests", 3, 1)]


def test_the_flattest_folder_may_be_one_of_tests(sizes: Sizes) -> None:
    assert sizes.flat == [FlatFolder("tests/one", 3), FlatFolder("engine_core", 1)]


def test_functions_are_measured_without_decorators_and_with_nested_ones(sizes: Sizes) -> None:
    assert (sizes.functions.count, sizes.functions.median) == (3, 2)
    assert (sizes.functions.longest, sizes.functions.longest_name) == (4, "engine_core/core.py:long")
    assert (sizes.files.median, sizes.files.longest_name) == (2, "engine_core/core.py")

"""The page of the matrix is made of its results, and a sample of the cells gives the same again."""

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.matrix.cells import Matrix, pairs, read, sample
from tests.matrix.features import FEATURES, Seen, nonsense
from tests.matrix.page import PAGE, page

SEED = int(os.environ.get("MATRIX_SEED", "1"))
COUNT = 4


def test_the_page_is_made_of_the_cells() -> None:
    cells = read()
    assert {(cell.first, cell.second) for cell in cells} <= set(pairs()), "run `make matrix`"
    assert PAGE.read_text() == page(cells), "run `make matrix`"
    assert not Counter(cell.verdict for cell in cells)["wrong"]


def test_what_excludes_itself_is_the_same_both_ways() -> None:
    for first, second in pairs():
        assert bool(nonsense(first, second)) == bool(nonsense(second, first))


def test_counters_fail_for_a_mesh_that_did_nothing() -> None:
    nothing = Seen({}, [], 0, [], is_other_than_without=False)
    blind = {name for name, feature in FEATURES.items() if feature.acted(nothing)}
    assert not blind & {
        "tensor parallel",
        "data parallel",
        "LoRA",
        "EAGLE",
        "P/D by shm",
        "offload",
        "Ray",
        "int4",
        "states",
    }


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(tmp_path_factory.mktemp("matrix"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cell", sample(SEED, COUNT, read()), ids=lambda cell: f"{cell.first} and {cell.second}")
def test_a_cell_gives_the_same_again(cell, matrix: Matrix, tmp_path: Path) -> None:
    assert matrix.cell(cell.first, cell.second) == cell

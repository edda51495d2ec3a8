"""Engines that are compared, as a slice of the columns or as rows."""

import numpy as np
import pytest

from tokenloom.services.runtime.placement.pool import Candidates


@pytest.mark.parametrize(
    ("rows", "index", "positions"),
    [
        ([2, 3, 4, 5], slice(2, 6), [0, 2]),
        ([0, 2, 4, 9], None, [1, 2]),
        ([4], slice(4, 5), [0]),
        ([], None, []),
    ],
)
def test_rows_that_follow_each_other_are_a_slice(rows: list[int], index: slice | None, positions: list[int]) -> None:
    candidates = Candidates(np.array(rows, np.intp))
    column = np.arange(10) * 10
    assert column[candidates.index].tolist() == [10 * row for row in rows]
    assert index is None or candidates.index == index
    assert candidates.positions([2, 4, 30]) == positions

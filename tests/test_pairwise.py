"""The chosen cases cover every pair of values, and are few."""

from itertools import combinations, product

from tests.pairwise import pairs


def test_each_value_meets_each_value_of_the_other_axes() -> None:
    axes = [range(10), "abcdef", [None, 1, 7], [True, False]]
    rows = pairs(*axes)
    for a, b in combinations(range(len(axes)), 2):
        assert {(row[a], row[b]) for row in rows} == set(product(axes[a], axes[b]))
    assert len(rows) <= 70
    assert rows == pairs(*axes)

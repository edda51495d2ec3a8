"""Chooses few cases out of many combinations: faults come from one value, or from two that meet."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis, among which each value of an axis meets each value of each other axis.

    For axes of 10, 6 and 6 values, these are about 60 rows of the 360. The same axes give the same rows.
    """
    values = [list(axis) for axis in axes]
    wanted = {
        ((a, i), (b, j))
        for a, b in combinations(range(len(values)), 2)
        for i, j in product(range(len(values[a])), range(len(values[b])))
    }
    rows = []
    while wanted:
        row = _row(dict(min(wanted)), values, wanted)
        wanted -= _met(row)
        rows.append(tuple(values[axis][row[axis]] for axis in range(len(values))))
    return rows


def _row(row: dict[int, int], values: list[list[Any]], wanted: set[Any]) -> dict[int, int]:
    """Complete a row: each further axis gets the value that meets the most that is still wanted."""
    for axis in range(len(values)):
        if axis not in row:
            row[axis] = max(range(len(values[axis])), key=lambda i: len(_met({**row, axis: i}) & wanted))
    return row


def _met(row: dict[int, int]) -> set[tuple[tuple[int, int], ...]]:
    return set(combinations(sorted(row.items()), 2))

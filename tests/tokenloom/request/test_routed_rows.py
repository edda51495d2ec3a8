"""Rows of experts are joined without gaps or repetitions, and written as .npy files."""

import io
from dataclasses import dataclass

import numpy as np
import pytest

from tokenloom.request.routed_rows import RoutedRows, routed_message, to_array, to_npy


@dataclass
class Part:
    start: int
    expert_ids: bytes
    num_layers: int = 2
    top_k: int = 1
    id_bytes: int = 1


def rows(first: int, last: int) -> bytes:
    """Rows of two layers; the numbers are those of the token."""
    return bytes(number for token in range(first, last) for number in (token, token + 100))


def test_rows_are_joined() -> None:
    joined = RoutedRows(2)
    joined.add(Part(0, rows(0, 5)))  # those before the start are not wanted
    joined.add(Part(3, rows(3, 8)))  # computed once more after a preemption
    joined.add(Part(1, rows(1, 4)))
    joined.add(Part(8, rows(8, 12)), end=10)
    assert (joined.start, joined.end) == (2, 10)
    assert joined.expert_ids == rows(2, 10)


def test_rows_after_a_gap_replace_the_others() -> None:
    joined = RoutedRows(0)
    joined.add(Part(0, rows(0, 2)))
    joined.add(Part(5, rows(5, 7)))
    assert (joined.start, joined.end, joined.expert_ids) == (5, 7, rows(5, 7))


def test_rows_are_sent_once() -> None:
    joined = RoutedRows(0)
    joined.add(Part(0, rows(0, 2)))
    joined.drop()
    joined.add(Part(1, rows(1, 4)))
    assert (joined.start, joined.end, joined.expert_ids) == (2, 4, rows(2, 4))


@pytest.mark.parametrize(("end", "left"), [(9, (0, 4)), (3, (0, 3)), (0, (0, 0))])
def test_rows_after_the_end_are_dropped(end: int, left: tuple[int, int]) -> None:
    joined = RoutedRows(0)
    joined.add(Part(0, rows(0, 4)))
    joined.cut(end)
    assert (joined.start, joined.end) == left
    assert joined.expert_ids == rows(*left)


@pytest.mark.parametrize(("id_bytes", "dtype"), [(1, "uint8"), (2, "uint16")])
def test_npy_files_hold_the_array(id_bytes: int, dtype: str) -> None:
    expected = np.arange(12, dtype=dtype).reshape(3, 2, 2)
    part = Part(4, expected.tobytes(), num_layers=2, top_k=2, id_bytes=id_bytes)
    for found in (to_array(routed_message(part)), np.load(io.BytesIO(to_npy(part)), allow_pickle=False)):
        assert found.dtype == expected.dtype
        assert np.array_equal(found, expected)

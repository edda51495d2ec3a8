"""Collects what changes in the rows of the batch, for a device that keeps copies of them."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


class RowChanges:
    """Holds what changed since it was taken last: the latest value of each place."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._rows: dict[int, None] = {}

    def add_blocks(self, start: int, block_ids: Sequence[int]) -> None:
        """Note block ids that were written from place ``start`` on: row * columns + column of the block table."""
        self._blocks.update(zip(range(start, start + len(block_ids)), block_ids, strict=True))

    def add_row(self, row: int) -> None:
        """Note that a request got this row."""
        self._rows[row] = None

    def take_blocks(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return places [n] and their block ids [n], which have changed, and forget them."""
        blocks, self._blocks = self._blocks, {}
        places = np.fromiter(blocks, dtype=np.int64, count=len(blocks))
        return places, np.fromiter(blocks.values(), dtype=np.int32, count=len(blocks))

    def take_rows(self) -> list[int]:
        """Return the rows that requests got, and forget them."""
        rows, self._rows = list(self._rows), {}
        return rows

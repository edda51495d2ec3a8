"""Records where each row's KV is: its blocks in order, and the slot of each position."""

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


class BlockTable:
    """Holds the block ids of every row of the input batch, [max_num_seqs, blocks of the longest request] int32.

    A slot is ``block id * block_size + position in the block``, the index of a token in the KV pool. Column
    ``index * num_groups + group`` is the block of that group of layers for the block of tokens ``index``.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1, num_blocks: int = 1 << 31
    ) -> None:
        """``num_blocks``: those of the cache; the ids are below it."""
        self.num_blocks_in_all = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        self.block_ids = np.zeros((max_num_seqs, -(-max_model_len // block_size) * num_groups), dtype=np.int32)
        """The tables of all rows, as they are at any later time."""
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        """How many blocks each row has, as they are at any later time."""
        self.changes: RowChanges | None = None
        """Collects what is written; None: no device keeps a copy."""

    def replace(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace the whole table of a row."""
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            start = self.num_blocks[row]
            self.num_blocks[row] = start + len(block_ids)
            self.block_ids[row, start : self.num_blocks[row]] = block_ids
            if len(block_ids) > 1:  # the kernel that gathers a step looks at those of its tokens alone
                assert 0 <= min(block_ids) <= max(block_ids) < self.num_blocks_in_all, (
                    f"no blocks of the cache: {block_ids}"
                )
            if self.changes is not None:
                self.changes.add_blocks(row * self.block_ids.shape[1] + int(start), block_ids)

    def gather(self, rows: Ints) -> npt.NDArray[np.int32]:
        """Return the tables of these rows, [n, blocks of the longest]. Entries beyond a row's count are undefined."""
        return self.block_ids[rows, : self.num_blocks[rows].max(initial=0)]

    def num_slots(self, row: int) -> int:
        """Return how many tokens the blocks of a row hold."""
        return self.num_blocks.item(row) * self.block_size

    def num_slots_of(self, rows: Ints) -> Ints:
        """Return how many tokens the blocks of these rows hold, [n]."""
        return self.num_blocks[rows] // self.num_groups * self.block_size

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Return the slots of n (row, position) pairs, [n], or [num_groups, n] if there are several groups."""
        columns = positions // self.block_size
        if self.num_groups > 1:
            columns = columns * self.num_groups + np.arange(self.num_groups)[:, None]
        block_ids = self.block_ids[rows, columns].astype(np.int64)
        return block_ids * self.block_size + positions % self.block_size

"""Keeps which engines hold the same blocks. No I/O."""

from collections import deque

import numpy as np
from numpy.typing import NDArray


class HolderGroup:
    """Names the engines that hold the same consecutive blocks of a prompt, if they are several.

    Attributes:
        hash_runs: The run in which each engine was given the blocks, by row.
        num_blocks: The blocks.
    """

    __slots__ = ("_array", "hash_runs", "num_blocks")

    def __init__(self, hash_runs: dict[int, int], num_blocks: int) -> None:
        self.hash_runs = hash_runs
        self.num_blocks = num_blocks
        self._array: NDArray[np.int64] | None = None

    def put(self, row: int, hash_run: int) -> None:
        """Add an engine, or name its newest run."""
        self.hash_runs[row] = hash_run
        self._array = None

    def rows(self, owner: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the engines that hold the blocks; -1 for those that were made to forget them."""
        if self._array is None:
            self._array = np.fromiter(self.hash_runs.values(), np.int64, len(self.hash_runs))
        rows: NDArray[np.int64] = owner.take(self._array)
        return rows


class BlockHolders:
    """Numbers the groups of one table, from 0.

    Attributes:
        num_bytes: About as many as the groups take.
    """

    GROUP_BYTES, ENGINE_BYTES = 500, 64  # of dictionaries and arrays, in CPython 3.11 and 3.12

    def __init__(self) -> None:
        self._groups: list[HolderGroup | None] = []
        self._free: deque[int] = deque()
        self.num_bytes = 0

    def __getitem__(self, number: int) -> HolderGroup:
        group = self._groups[number]
        assert group is not None
        return group

    def add(self, hash_runs: dict[int, int], num_blocks: int) -> int:
        """Add a group and return its number."""
        group = HolderGroup(hash_runs, num_blocks)
        self.num_bytes += self.GROUP_BYTES + self.ENGINE_BYTES * len(hash_runs)
        if self._free:
            number = self._free.popleft()
            self._groups[number] = group
        else:
            number = len(self._groups)
            self._groups.append(group)
        return number

    def put(self, number: int, row: int, hash_run: int) -> None:
        """Add an engine to a group, or name its newest run."""
        group = self[number]
        self.num_bytes += self.ENGINE_BYTES * (row not in group.hash_runs)
        group.put(row, hash_run)

    def leave(self, number: int, num_blocks: int) -> None:
        """Note that so many blocks belong to the group no more, and remove it with the last one."""
        group = self[number]
        group.num_blocks -= num_blocks
        if group.num_blocks <= 0:
            self.num_bytes -= self.GROUP_BYTES + self.ENGINE_BYTES * len(group.hash_runs)
            self._groups[number] = None
            self._free.append(number)

    def take(self, count: int) -> bool:
        """Drop ``count`` groups, because the table is not used any more. Returns whether any are left."""
        del self._groups[-count:]
        return bool(self._groups)

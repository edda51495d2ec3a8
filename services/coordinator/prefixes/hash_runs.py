"""Forgets of each engine the blocks that it no longer has room for. No I/O."""

import numpy as np

_RUNS_PER_ENGINE = 8
"""An engine's blocks are forgotten by the eighth of its cache."""


class HashRuns:
    """Numbers the runs of additions to each engine.

    Blocks that were added to an engine in one run are forgotten together, those that were not used for the longest
    time first, so that of each engine at most as many blocks are remembered as its cache holds. What refers to a
    run that is forgotten need not be searched for: the run belongs to no engine any more.

    Attributes:
        owner: Row of the engine by the number of the run; -1: forgotten. Numbers begin at 1.
        num_new: Runs that began since :meth:`recycle`.
        num_blocks: Blocks that all engines' caches hold.
    """

    def __init__(self) -> None:
        self.owner = np.full(16, -1, np.int64)
        self.num_new = self.num_blocks = 0
        self._num_used = 1
        self._free: list[int] = []
        self._forgotten: tuple[list[int], list[int]] = [], []  # before and after the last call of recycle
        self._blocks: dict[int, dict[int, int]] = {}  # by row and run, the newest run last
        self._newest: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def open(self, row: int, num_blocks: int) -> None:
        """Begin with an engine of which nothing is remembered. ``num_blocks``: what its cache holds."""
        self.close(row)
        self._limits[row] = num_blocks
        self.num_blocks += num_blocks
        self._blocks[row] = {}
        self._begin(row)

    def close(self, row: int) -> None:
        """Forget all of an engine."""
        for hash_run in self._blocks.pop(row, ()):
            self._forget(hash_run)
        self.num_blocks -= self._limits.pop(row, 0)

    def limit(self, row: int) -> int:
        return self._limits[row]

    def has(self, row: int, hash_run: int) -> bool:
        """Return whether what was added to an engine in a run is still remembered."""
        return hash_run in self._blocks.get(row, ())

    def newest(self, row: int) -> int:
        """Return the run to which the next blocks of an engine belong."""
        hash_run = self._newest[row]
        if self._blocks[row][hash_run] * _RUNS_PER_ENGINE >= self._limits[row]:
            return self._begin(row)
        return hash_run

    def move(self, row: int, num_blocks: int, from_stretch: int | None) -> None:
        """Count blocks that were added to the newest run, or moved there from another one of the same engine."""
        blocks = self._blocks[row]
        blocks[self._newest[row]] += num_blocks
        if from_stretch in blocks:
            blocks[from_stretch] -= num_blocks

    def drop(self, row: int, num_blocks: int, hash_run: int) -> None:
        """Note that an engine no longer has so many blocks of one run."""
        self._blocks[row][hash_run] -= num_blocks

    def trim(self, row: int) -> None:
        """Forget the oldest runs of an engine until its cache can hold the rest."""
        blocks, limit = self._blocks[row], self._limits[row]
        total = sum(blocks.values())
        # The newest run always stays, though it may exceed the limit: the pick that was just made is in it.
        while total > limit and len(blocks) > 1:
            oldest = next(iter(blocks))
            total -= blocks.pop(oldest)
            self._forget(oldest)

    def recycle(self) -> None:
        """Note that nothing refers any more to what was forgotten before the last call."""
        # A number is given out again only two generations after it was forgotten: until then blocks of the old
        # generation may still name it, and would seem to belong to its new engine.
        self._free += self._forgotten[0]
        self._forgotten = self._forgotten[1], []
        self.num_new = 0

    def _begin(self, row: int) -> int:
        if self._free:
            hash_run = self._free.pop()
        else:
            hash_run, self._num_used = self._num_used, self._num_used + 1
            if hash_run == len(self.owner):
                self.owner = np.concatenate([self.owner, np.full_like(self.owner, -1)])
        self.owner[hash_run] = row
        self.num_new += 1
        self._blocks[row][hash_run] = 0
        self._newest[row] = hash_run
        return hash_run

    def _forget(self, hash_run: int) -> None:
        self.owner[hash_run] = -1
        self._forgotten[1].append(hash_run)

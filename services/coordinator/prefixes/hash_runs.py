"""Forgets of each engine the blocks that it no longer has room for. No I/O."""

import numpy as np

_STRETCHES = 8
"""An engine's blocks are forgotten by the eighth of its cache."""


class HashRuns:
    """Numbers the stretches of additions to each engine.

    Blocks that were added to an engine in one stretch are forgotten together, those that were not used for the longest
    time first, so that of each engine at most as many blocks are remembered as its cache holds. What refers to a
    stretch that is forgotten need not be searched for: the stretch belongs to no engine any more.

    Attributes:
        owner: Row of the engine by the number of the stretch; -1: forgotten. Numbers begin at 1.
        num_new: HashRuns that began since :meth:`recycle`.
        num_blocks: Blocks that all engines' caches hold.
    """

    def __init__(self) -> None:
        self.owner = np.full(16, -1, np.int64)
        self.num_new = self.num_blocks = 0
        self._num_used = 1
        self._free: list[int] = []
        self._forgotten: tuple[list[int], list[int]] = [], []  # before and after the last call of recycle
        self._blocks: dict[int, dict[int, int]] = {}  # by row and stretch, the newest stretch last
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
        for stretch in self._blocks.pop(row, ()):
            self._forget(stretch)
        self.num_blocks -= self._limits.pop(row, 0)

    def limit(self, row: int) -> int:
        return self._limits[row]

    def has(self, row: int, stretch: int) -> bool:
        """Return whether what was added to an engine in a stretch is still remembered."""
        return stretch in self._blocks.get(row, ())

    def newest(self, row: int) -> int:
        """Return the stretch to which the next blocks of an engine belong."""
        stretch = self._newest[row]
        if self._blocks[row][stretch] * _STRETCHES >= self._limits[row]:
            return self._begin(row)
        return stretch

    def move(self, row: int, num_blocks: int, from_stretch: int | None) -> None:
        """Count blocks that were added to the newest stretch, or moved there from another one of the same engine."""
        blocks = self._blocks[row]
        blocks[self._newest[row]] += num_blocks
        if from_stretch in blocks:
            blocks[from_stretch] -= num_blocks

    def drop(self, row: int, num_blocks: int, stretch: int) -> None:
        """Note that an engine no longer has so many blocks of one stretch."""
        self._blocks[row][stretch] -= num_blocks

    def trim(self, row: int) -> None:
        """Forget the oldest stretches of an engine until its cache can hold the rest."""
        blocks, limit = self._blocks[row], self._limits[row]
        total = sum(blocks.values())
        # The newest stretch always stays, though it may exceed the limit: the pick that was just made is in it.
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
            stretch = self._free.pop()
        else:
            stretch, self._num_used = self._num_used, self._num_used + 1
            if stretch == len(self.owner):
                self.owner = np.concatenate([self.owner, np.full_like(self.owner, -1)])
        self.owner[stretch] = row
        self.num_new += 1
        self._blocks[row][stretch] = 0
        self._newest[row] = stretch
        return stretch

    def _forget(self, stretch: int) -> None:
        self.owner[stretch] = -1
        self._forgotten[1].append(stretch)

"""Keeps the blocks of prompts in the order in which they came, so that a prompt is found in a few pieces. No I/O."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hash_table import BYTES_PER_ENTRY, HashTable, Values, Words

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
            self.drop(row, num_blocks, from_stretch)

    def drop(self, row: int, num_blocks: int, hash_run: int) -> None:
        """Note that an engine no longer has so many blocks of one run."""
        blocks = self._blocks[row]
        blocks[hash_run] -= num_blocks
        # A prompt that is picked again and again moves from run to run. Of an engine that is never full, the runs that
        # it leaves behind would otherwise be kept, and counted at each pick, for ever.
        if blocks[hash_run] <= 0 and hash_run != self._newest[row]:
            del blocks[hash_run]
            self._forget(hash_run)

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


_BLOCKS_PER_PIECE = 4
"""The log is full when pieces are shorter on average."""
_WORD_BYTES, _VALUE_BYTES = 8, 4
BLOCK_BYTES = _WORD_BYTES + _VALUE_BYTES + BYTES_PER_ENTRY / _BLOCKS_PER_PIECE
SEARCHABLE_BLOCK_BYTES = BLOCK_BYTES + BYTES_PER_ENTRY
_MAX_ENTERED = 1 << 16
"""Blocks that are entered into the table at one moment: that takes a few milliseconds."""
_MAX_BEHIND = 2048
"""Blocks that wait until they are entered together: each piece for itself would take several times as long."""


class LoggedBlocks(NamedTuple):
    """Says where a part of a prompt is: its blocks from ``begin`` to ``end`` are from ``position`` on in the log."""

    begin: int
    end: int
    position: int


class BlockLog:
    """Keeps blocks with one value each, and forgets none: its owner begins another one when it is full.

    What is new of a prompt is appended in one piece. A table has where pieces begin. The blocks of a prompt are
    chained, so that one of them follows another in the log, or begins a piece: the search for a prompt compares whole
    pieces, and needs the table only where prompts parted.

    Args:
        max_blocks: It has room for so many.
        is_searchable: Whether any block can be found by its hash alone, as eviction needs it.

    Attributes:
        num_blocks: Blocks that it has.
        values: Of the blocks, by position, shape [max_blocks].
        words: Their hashes, by position, shape [max_blocks].
        starts: The positions at which pieces begin, by their first words.
    """

    def __init__(self, max_blocks: int, *, is_searchable: bool) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.values: NDArray[np.uint32] = np.zeros(max_blocks, np.uint32)  # memory is taken where it is written
        self.words: Words = np.zeros(max_blocks, np.uint64)
        self.starts = HashTable(max_blocks // _BLOCKS_PER_PIECE)
        self._all = HashTable(max_blocks) if is_searchable else None

    def has_room(self, num_blocks: int) -> bool:
        """Return whether a piece of so many blocks can be appended."""
        starts = self.starts
        return self.num_blocks + num_blocks <= self.max_blocks and starts.num_entries < starts.max_entries

    def leading(self, words: Words, position: int = -1) -> list[LoggedBlocks]:
        """Return where the leading blocks of a prompt are, as far as they are known, or blocks that follow each other
        from the one at ``position`` on."""
        pieces: list[LoggedBlocks] = []
        begin = 0
        while begin < len(words) and (position >= 0 or (position := self.starts.get(int(words[begin]))) >= 0):
            known = self.words[position : min(position + len(words) - begin, self.num_blocks)]
            is_equal = known == words[begin : begin + len(known)]
            length = int(is_equal.argmin())
            if is_equal[length]:
                length = len(known)
            elif not length:
                break  # the table has found another word
            pieces.append(LoggedBlocks(begin, begin + length, position))
            begin, position = begin + length, -1
        return pieces

    def make_searchable(self) -> bool:
        """Let any block be found, unless that would take too long. Returns whether it can be."""
        if self._all is None and self.num_blocks <= _MAX_ENTERED:
            self._all = HashTable(self.max_blocks)
        return self._all is not None

    def append(self, words: Words) -> int:
        """Add blocks that are not there, each of which follows the one before it.

        Returns the position of the first; the caller writes their values.
        """
        position = self.num_blocks
        self.num_blocks += len(words)
        self.words[position : self.num_blocks] = words
        self.starts.add(int(words[0]), position)
        if self._all is not None and self.num_blocks - self._all.num_entries > _MAX_BEHIND:
            self._enter(self._all)
        return position

    def find(self, words: Words) -> Values:
        """Return the positions of any blocks, shape [n]; -1 for those that are not there or cannot be searched for."""
        if self._all is None:
            return np.full(len(words), -1, np.int64)
        self._enter(self._all)
        return self._all.find(words)

    def _enter(self, table: HashTable) -> None:
        """Enter into the table what it lacks."""
        begin = table.num_entries
        table.insert(self.words[begin : self.num_blocks], np.arange(begin, self.num_blocks))

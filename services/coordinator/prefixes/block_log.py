"""Keeps the blocks of prompts in the order in which they came, so that a prompt is found in a few pieces. No I/O."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .hash_table import BYTES_PER_ENTRY, HashTable, Values, Words

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
    """

    def __init__(self, max_blocks: int, *, is_searchable: bool) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        self.values: NDArray[np.uint32] = np.zeros(max_blocks, np.uint32)  # memory is taken where it is written
        self._words: Words = np.zeros(max_blocks, np.uint64)
        self._starts = HashTable(max_blocks // _BLOCKS_PER_PIECE)
        self._all = HashTable(max_blocks) if is_searchable else None

    def has_room(self, num_blocks: int) -> bool:
        """Return whether a piece of so many blocks can be appended."""
        starts = self._starts
        return self.num_blocks + num_blocks <= self.max_blocks and starts.num_entries < starts.max_entries

    def leading(self, words: Words, position: int = -1) -> list[LoggedBlocks]:
        """Return where the leading blocks of a prompt are, as far as they are known, or blocks that follow each other
        from the one at ``position`` on."""
        pieces: list[LoggedBlocks] = []
        begin = 0
        while begin < len(words) and (position >= 0 or (position := self._starts.get(int(words[begin]))) >= 0):
            known = self._words[position : min(position + len(words) - begin, self.num_blocks)]
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
        self._words[position : self.num_blocks] = words
        self._starts.add(int(words[0]), position)
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
        table.insert(self._words[begin : self.num_blocks], np.arange(begin, self.num_blocks))

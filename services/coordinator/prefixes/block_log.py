"""Keeps the blocks of prompts in the order in which they came, so that a prompt is found in a few pieces. No I/O."""

from collections.abc import Sequence
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
        counts: Blocks of the engine by the number of the run.
        num_new: Runs that began since :meth:`recycle`.
        num_blocks: Blocks that all engines' caches hold.
    """

    def __init__(self) -> None:
        self.owner, self.counts = np.full(16, -1, np.int64), np.zeros(16, np.int64)
        self.num_new = self.num_blocks = 0
        self._num_used = 1
        self._free: list[int] = []
        self._forgotten: tuple[list[int], list[int]] = [], []  # before and after the last call of recycle
        self._runs: dict[int, dict[int, None]] = {}  # by row, the newest run last
        self._newest: dict[int, int] = {}
        self._limits: dict[int, int] = {}

    def open(self, row: int, num_blocks: int) -> None:
        """Begin with an engine of which nothing is remembered. ``num_blocks``: what its cache holds."""
        self.close(row)
        self._limits[row] = num_blocks
        self.num_blocks += num_blocks
        self._runs[row] = {}
        self._begin(row)

    def close(self, row: int) -> None:
        """Forget all of an engine."""
        for hash_run in self._runs.pop(row, ()):
            self._forget(hash_run)
        self.num_blocks -= self._limits.pop(row, 0)

    def limit(self, row: int) -> int:
        return self._limits[row]

    def has(self, row: int, hash_run: int) -> bool:
        """Return whether what was added to an engine in a run is still remembered."""
        return bool(self.owner[hash_run] == row)

    def newest(self, row: int) -> int:
        """Return the run to which the next blocks of an engine belong."""
        hash_run = self._newest[row]
        if self.counts.item(hash_run) * _RUNS_PER_ENGINE >= self._limits[row]:
            return self._begin(row)
        return hash_run

    def move(self, row: int, num_blocks: int, from_run: int) -> None:
        """Count blocks that were added to the newest run, or moved there from another one of the same engine."""
        self.counts[self._newest[row]] += num_blocks
        if self.has(row, from_run):
            self.drop(row, num_blocks, from_run)

    def drop(self, row: int, num_blocks: int, hash_run: int) -> None:
        """Note that an engine no longer has so many blocks of one run."""
        self.counts[hash_run] -= num_blocks
        if self.counts[hash_run] <= 0 and hash_run != self._newest[row]:
            self.leave(row, hash_run)

    def leave(self, row: int, hash_run: int) -> None:
        """Forget a run of which the engine has no blocks any more."""
        # A prompt that is picked again and again moves from run to run. Of an engine that is never full, the runs that
        # it leaves behind would otherwise be kept, and counted at each pick, for ever.
        del self._runs[row][hash_run]
        self._forget(hash_run)

    def trim(self, row: int) -> None:
        """Forget the oldest runs of an engine until its cache can hold the rest."""
        runs, limit, count = self._runs[row], self._limits[row], self.counts.item
        total = sum(map(count, runs))
        # The newest run always stays, though it may exceed the limit: the pick that was just made is in it.
        while total > limit and len(runs) > 1:
            oldest = next(iter(runs))
            total -= count(oldest)
            self.leave(row, oldest)

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
                self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
        self.owner[hash_run], self.counts[hash_run] = row, 0
        self.num_new += 1
        self._runs[row][hash_run] = None
        self._newest[row] = hash_run
        return hash_run

    def _forget(self, hash_run: int) -> None:
        self.owner[hash_run] = -1
        self._forgotten[1].append(hash_run)


class BlockHolders:
    """Keeps groups: the engines that hold the same consecutive blocks of a prompt, if they are several.

    A group has a room in one array for all, of a power of two of runs: those in which each of its engines was given the
    blocks. Engines that were made to forget them stay there until the room is full. Groups are numbered from 0.

    Attributes:
        runs: All rooms, one after the other. A free one begins with where the next free one of its size begins.
        begins: Where the room of each group begins, shape [groups]; of a free number, the next free one, or -1.
        sizes: The runs of each group, shape [groups]; 0: there is no such group.
        rooms: For how many there is room, shape [groups].
        num_blocks: The blocks of each group, shape [groups].
        free_rooms: Where the first free room of 2^n runs begins, by n, or -1, shape [64].
        state: Numbers in use, runs in use, the first free number or -1, and the bytes of all groups.
    """

    GROUP_BYTES, RUN_BYTES = 32, 8

    def __init__(self) -> None:
        self.runs = np.zeros(64, np.int64)
        self.begins, self.sizes, self.rooms, self.num_blocks = (np.zeros(16, np.int64) for _ in range(4))
        self.free_rooms = np.full(64, -1, np.int64)
        self.state = np.array([0, 0, -1, 0], np.int64)

    @property
    def num_bytes(self) -> int:
        """As many as the groups take."""
        return self.state.item(3)

    def members(self, number: int) -> Values:
        """Return the runs of a group, shape [n]."""
        begin = self.begins.item(number)
        return self.runs[begin : begin + self.sizes.item(number)]

    def add(self, members: Sequence[int] | Values, num_blocks: int) -> int:
        """Add a group and return its number."""
        self.reserve(1, _room_for(len(members)))
        if (number := self.state.item(2)) >= 0:
            self.state[2] = self.begins[number]
        else:
            number = self.state.item(0)
            self.state[0] += 1
        self._place(number, members)
        self.num_blocks[number] = num_blocks
        self.state[3] += self.GROUP_BYTES
        return number

    def put(self, number: int, at: int, hash_run: int, owner: Values) -> None:
        """Name the newest run of an engine whose run is the one ``at`` a position, or add an engine (-1)."""
        members = self.members(number)
        if at >= 0:
            members[at] = hash_run
            return
        if len(members) == self.rooms[number]:
            members = members[owner.take(members) >= 0]
            self.reserve(0, _room_for(len(members) + 1))
            self._free_room(number)
            self._place(number, [*members.tolist(), hash_run])
        else:
            self.sizes[number] += 1
            self.members(number)[-1] = hash_run

    def leave(self, number: int, num_blocks: int) -> None:
        """Note that so many blocks belong to the group no more, and remove it with the last one."""
        self.num_blocks[number] -= num_blocks
        if self.num_blocks[number] <= 0:
            self._free_room(number)
            self.sizes[number] = 0
            self.begins[number], self.state[2] = self.state[2], number
            self.state[3] -= self.GROUP_BYTES

    def reserve(self, num_groups: int, num_runs: int) -> None:
        """Make sure that so many groups more, with rooms for so many runs, find room."""
        while self.state[0] + num_groups > len(self.begins):
            self._double_numbers()
        while self.state[1] + num_runs > len(self.runs):
            self.runs = _doubled(self.runs)

    def double(self) -> None:
        """Make twice the room."""
        self._double_numbers()
        self.runs = _doubled(self.runs)

    def _double_numbers(self) -> None:
        for name in ("begins", "sizes", "rooms", "num_blocks"):
            setattr(self, name, _doubled(getattr(self, name)))

    def _place(self, number: int, members: Sequence[int] | Values) -> None:
        room = _room_for(len(members))
        size_class = room.bit_length() - 1
        if (begin := self.free_rooms.item(size_class)) >= 0:
            self.free_rooms[size_class] = self.runs[begin]
        else:
            begin = self.state.item(1)
            self.state[1] += room
        self.runs[begin : begin + len(members)] = members
        self.begins[number], self.sizes[number], self.rooms[number] = begin, len(members), room
        self.state[3] += self.RUN_BYTES * room

    def _free_room(self, number: int) -> None:
        begin, room = self.begins.item(number), self.rooms.item(number)
        size_class = room.bit_length() - 1
        self.runs[begin], self.free_rooms[size_class] = self.free_rooms[size_class], begin
        self.state[3] -= self.RUN_BYTES * room


def _room_for(size: int) -> int:
    """Return the least power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()


def _doubled(array: Values) -> Values:
    return np.concatenate([array, np.zeros_like(array)])


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
        self.words[position : position + len(words)] = words
        self.starts.add(int(words[0]), position)
        self.appended(len(words))
        return position

    def appended(self, num_blocks: int) -> None:
        """Note that so many blocks have been appended."""
        self.num_blocks += num_blocks
        if self._all is not None and self.num_blocks - self._all.num_entries > _MAX_BEHIND:
            self._enter(self._all)

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

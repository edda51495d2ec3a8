"""Remembers which prefixes each engine probably has in its KV cache: those of its recent picks. No I/O."""

from array import array
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tokenloom.request.prefix_schedule import LEADING_BLOCKS, MAX_HASHES
from tokenloom.services.runtime.placement.engine_columns import IntColumn

from .block_log import BLOCK_BYTES, SEARCHABLE_BLOCK_BYTES, BlockLog, HashRuns, LoggedBlocks
from .hash_table import Values, Words, words_of


class HolderGroup:
    """Names the engines that hold the same consecutive blocks of a prompt, if they are several.

    Attributes:
        hash_runs: The run in which each engine was given the blocks, by row.
        runs: The runs, 64 bits each.
        num_blocks: The blocks.
    """

    __slots__ = ("hash_runs", "num_blocks", "runs")

    def __init__(self, hash_runs: dict[int, int], num_blocks: int) -> None:
        self.hash_runs = hash_runs
        self.num_blocks = num_blocks
        self.runs = array("q", hash_runs.values())

    def put(self, row: int, hash_run: int) -> None:
        """Add an engine, or name its newest run."""
        before, self.hash_runs[row] = self.hash_runs.get(row), hash_run
        if before is None:
            self.runs.append(hash_run)
        else:
            self.runs[self.runs.index(before)] = hash_run  # no run has two engines

    def rows(self, owner: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows of the engines that hold the blocks; -1 for those that were made to forget them."""
        rows: NDArray[np.int64] = owner.take(np.frombuffer(self.runs, np.int64))
        return rows


class BlockHolders:
    """Numbers the groups of one table, from 0.

    Attributes:
        num_bytes: About as many as the groups take.
        addresses: Where the runs of each group begin in memory, for native code, shape [capacity].
        sizes: How many engines each group has, shape [capacity]; 0: there is no such group.
    """

    GROUP_BYTES, ENGINE_BYTES = 500, 64  # of dictionaries and arrays, in CPython 3.11 and 3.12

    def __init__(self) -> None:
        self._groups: list[HolderGroup | None] = []
        self._free: deque[int] = deque()
        self.num_bytes = 0
        self.addresses, self.sizes = np.zeros(16, np.int64), np.zeros(16, np.int64)

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
            if number == len(self.sizes):
                self.addresses, self.sizes = (np.concatenate([each, 0 * each]) for each in (self.addresses, self.sizes))
        self._show(number, group)
        return number

    def put(self, number: int, row: int, hash_run: int) -> None:
        """Add an engine to a group, or name its newest run."""
        group = self[number]
        self.num_bytes += self.ENGINE_BYTES * (row not in group.hash_runs)
        group.put(row, hash_run)
        self._show(number, group)

    def leave(self, number: int, num_blocks: int) -> None:
        """Note that so many blocks belong to the group no more, and remove it with the last one."""
        group = self[number]
        group.num_blocks -= num_blocks
        if group.num_blocks <= 0:
            self.num_bytes -= self.GROUP_BYTES + self.ENGINE_BYTES * len(group.hash_runs)
            self._groups[number] = None
            self.sizes[number] = 0
            self._free.append(number)

    def take(self, count: int) -> bool:
        """Drop ``count`` groups, because the table is not used any more. Returns whether any are left."""
        del self._groups[-count:]
        return bool(self._groups)

    def _show(self, number: int, group: HolderGroup) -> None:
        self.addresses[number], self.sizes[number] = group.runs.buffer_info()


MAX_BLOCKS = 1 << 16
"""Blocks remembered of one engine at most."""
_MIN_ENTRIES = 1 << 12
_LOG_SHARE = 0.75  # of the bytes; the rest is for groups
_MAX_RUNS = 1 << 16  # begun in one generation
_GROUP = 1 << 31  # values from here on number groups
_OLD = 1 << 40  # added to values of the old generation
_SWEPT_GROUPS = 256  # freed at each pick: all at once would take too long


class Generation:
    """Holds blocks. Their values in ``log``: 0: no engine has the block; below ``_GROUP``: the run of the only engine
    that has it; otherwise one of ``groups``."""

    def __init__(self, max_blocks: int, *, is_searchable: bool) -> None:
        self.log = BlockLog(max_blocks, is_searchable=is_searchable)
        self.groups = BlockHolders()


class Run(NamedTuple):
    """Describes consecutive blocks of a prompt that the same engines have.

    Attributes:
        begin: The first one.
        end: The one behind the last.
        value: Who has them; from ``_OLD`` on: in the old generation, which may not have them either.
        position: In the log of the young generation; -1: they are not there, nor are those behind them.
    """

    begin: int
    end: int
    value: int
    position: int


class Path(NamedTuple):
    """Shows the blocks of a prompt as the index has them, until the index changes.

    Attributes:
        words: All blocks.
        num_known: Leading blocks that are in the young generation.
        runs: Of all blocks.
    """

    words: Words
    num_known: int
    runs: list[Run]


class Lookups(Protocol):
    """Looks prompts up in an index as :meth:`PrefixIndex.lookup` says."""

    def lookup(self, index: "PrefixIndex", words: Words, num_rows: int) -> tuple[Path, IntColumn | None]: ...


class PrefixIndex:
    """Finds all engines that have the beginning of a prompt, whatever their number.

    A block is kept once, however many engines have it, in 15 bytes: its hash and who has it (:class:`.BlockLog`).
    Consecutive blocks that the same engines have share one group, as in a radix tree. Hashes are chained: a block's
    stands for all of its prefix, so the blocks of a prompt that an engine has are always the leading ones.

    Two bounds decide what is kept. Of each engine, at most as many blocks as its cache holds, in eighths that are
    forgotten together, the least recently picked first (:class:`.HashRuns`). Of all engines, as many blocks as fit
    into ``max_bytes``: a young generation takes every block that is picked, and when it is full, it becomes the old
    one, and the old one is forgotten. Thus between half and all of the capacity holds the most recently picked blocks.
    256 MiB are 7 to 14 million different blocks of any number of engines, and 4 to 8 million once evictions are
    followed. A small fleet has small generations.

    Args:
        max_bytes: Of memory, about.

    Attributes:
        young: The generation that takes what is picked.
        old: The one before it.
        hash_runs: When each engine was given its blocks.
        is_searchable: Whether blocks have been evicted, or stored behind others.
        native: Looks prompts up on the same arrays; None: Python does.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_log_bytes = int(max_bytes * _LOG_SHARE / 2)
        self._max_group_bytes = int(max_bytes * (1 - _LOG_SHARE) / 2)
        self.hash_runs = HashRuns()
        self.is_searchable = False  # what is remembered from the first eviction on
        self.young, self.old = (Generation(0, is_searchable=False) for _ in range(2))
        self._swept: list[BlockHolders] = []
        self.native: Lookups | None = None

    def open(self, row: int, num_blocks: int) -> None:
        """Add an engine, or forget what was remembered of the one in its row. ``num_blocks``: what its cache holds."""
        self.hash_runs.open(row, min(num_blocks, MAX_BLOCKS))

    def close(self, row: int) -> None:
        """Remove an engine."""
        self.hash_runs.close(row)

    def find(self, hashes: Sequence[int]) -> Path:
        """Look a prompt up. ``hashes``: of its blocks, from the first on."""
        return self._find(words_of(hashes if len(hashes) <= MAX_HASHES else hashes[:MAX_HASHES]))

    def lookup(self, words: Words, num_rows: int) -> tuple[Path, IntColumn | None]:
        """Return what :meth:`find` and :meth:`num_blocks` return, natively where that is possible. The counts are valid
        until the next call. ``words``: of at most :data:`.MAX_HASHES` blocks."""
        if self.native is not None:
            return self.native.lookup(self, words, num_rows)
        path = self._find(words)
        return path, self.num_blocks(path, num_rows)

    def num_blocks(self, path: Path, num_rows: int) -> IntColumn | None:
        """Return how many leading blocks of a prompt each engine has, by row, shape [num_rows]; None if no engine has
        any. A hash stands for the blocks that :data:`.LEADING_BLOCKS` says."""
        counts: IntColumn | None = None
        owner = self.hash_runs.owner
        for begin, end, value, _ in path.runs:
            generation, value = (self.old, value - _OLD) if value >= _OLD else (self.young, value)
            if value == 0:
                break
            if counts is None:
                counts = np.zeros(num_rows + 1, np.int64)  # the last one is for what was forgotten: row -1
            if value < _GROUP:
                row = owner.item(value)
                if counts.item(row) != LEADING_BLOCKS[begin]:
                    break
                counts[row] = LEADING_BLOCKS[end]
            else:
                rows = generation.groups[value - _GROUP].rows(owner)
                if begin and self.is_searchable:  # otherwise nothing was evicted: it has the blocks before these too
                    rows = rows[counts[rows] == LEADING_BLOCKS[begin]]
                counts[rows] = LEADING_BLOCKS[end]
        return None if counts is None else counts[:-1]

    def add(self, path: Path, row: int) -> None:
        """Remember that an engine will have the blocks of a prompt, or as many as its cache holds."""
        num_blocks = min(len(path.words), self.hash_runs.limit(row))
        if not num_blocks:
            return
        # Two generations instead of a list in the order of use: 65,536 blocks of a thousand engines took 8.7 GiB as
        # ordered dictionaries, and searching them 11 to 41 ms a pick.
        if self._is_full(num_blocks - path.num_known):
            self._rotate()
            # The path names positions in the generation that has just become the old one, so it is looked up again.
            path = self._find(path.words)
        num_known, log = path.num_known, self.young.log
        newest = self.hash_runs.newest(row)
        appended = log.append(path.words[num_known:num_blocks]) if num_blocks > num_known else 0
        for begin, end, before, position in path.runs:
            end = min(end, num_blocks)
            if begin >= end:
                break
            after = self._with(before, row, newest, end - begin)
            if position < 0:
                position = appended + begin - num_known
            elif after == before:
                continue
            log.values[position : position + end - begin] = after
        self.hash_runs.trim(row)
        if self._swept and not self._swept[-1].take(_SWEPT_GROUPS):
            self._swept.pop()

    def store(self, parent: int | None, blocks: Sequence[int], row: int) -> None:
        """Remember blocks that an engine's cache has stored, each of which follows the one before it.

        They are left out if their engine is not known to have ``parent``, the block before them (None: they begin a
        prompt), because they would not count; and if ``parent`` is not in the young generation, or would not be after
        this, because no block is there without those before it.
        """
        if parent is None:
            self.add(self.find(blocks), row)
            return
        if not self.is_searchable:
            self._become_searchable()
        words = words_of([parent, *blocks])
        position = int(self.young.log.find(words[:1])[0])
        if position >= 0 and self._has(self.young, int(self.young.log.values[position]), row):
            path = self._find(words, position)
            if path.num_known and not self._is_full(len(words) - path.num_known):
                self.add(path, row)

    def remove(self, hashes: Sequence[int], row: int) -> None:
        """Forget blocks, in any order, that an engine's cache has evicted. The index is searchable only
        from the first call on, so blocks that were added before it may not be found."""
        if not self.is_searchable:
            self._become_searchable()
        words = words_of(hashes)
        for generation in (self.young, self.old):
            positions = generation.log.find(words)
            self._drop(generation, positions[positions >= 0], row)
            words = words[positions < 0]

    def _find(self, words: Words, position: int = -1) -> Path:
        """Look blocks up that begin a prompt, or whose first one is at ``position`` in the young generation."""
        runs: list[Run] = []
        for piece in self.young.log.leading(words, position):
            runs += _runs(self.young.log, piece, 0)
        num_known = num_found = runs[-1].end if runs else 0
        if num_known < len(words):
            for piece in self.old.log.leading(words) if self.old.log.num_blocks else ():
                if piece.end > num_known:
                    skipped = max(num_known - piece.begin, 0)
                    rest = LoggedBlocks(piece.begin + skipped, piece.end, piece.position + skipped)
                    runs += [Run(run.begin, run.end, run.value, -1) for run in _runs(self.old.log, rest, _OLD)]
                    num_found = piece.end
            if num_found < len(words):
                runs.append(Run(num_found, len(words), _OLD, -1))
        return Path(words, num_known, runs)

    def _with(self, value: int, row: int, newest: int, num_blocks: int) -> int:
        """Return the value, in the young generation, of blocks that the engine in ``row`` has too from now on."""
        hash_runs, groups, is_old = self.hash_runs, self.young.groups, value >= _OLD
        if is_old:
            value -= _OLD
        if value >= _GROUP:
            return self._with_group(value, row, newest, num_blocks, is_old)
        owner = int(hash_runs.owner[value]) if value else -1
        if value != newest:
            hash_runs.move(row, num_blocks, value if owner == row else None)
        if owner in (-1, row):
            return newest
        return _GROUP + groups.add({owner: value, row: newest}, num_blocks)

    def _with_group(self, value: int, row: int, newest: int, num_blocks: int, is_old: bool) -> int:
        groups, group = self.young.groups, (self.old if is_old else self.young).groups[value - _GROUP]
        before = group.hash_runs.get(row)
        if before != newest:
            self.hash_runs.move(row, num_blocks, before)
        if not is_old:
            if before == newest:
                return value
            if num_blocks == group.num_blocks:
                groups.put(value - _GROUP, row, newest)
                return value
            members = dict(group.hash_runs)
            groups.leave(value - _GROUP, num_blocks)
        else:  # what was forgotten must not come into the young generation
            members = {
                each: hash_run for each, hash_run in group.hash_runs.items() if self.hash_runs.has(each, hash_run)
            }
        members[row] = newest
        return _GROUP + groups.add(members, num_blocks)

    def _drop(self, generation: Generation, positions: Values, row: int) -> None:
        """Remove an engine from the blocks at some positions."""
        groups, values = generation.groups, generation.log.values
        present = values[positions]
        for value in np.unique(present).tolist():
            if not self._has(generation, value, row):
                continue
            of_value, hash_run, after = positions[present == value], value, 0
            if value >= _GROUP:
                others = dict(groups[value - _GROUP].hash_runs)
                hash_run = others.pop(row)
                groups.leave(value - _GROUP, len(of_value))
                after = _GROUP + groups.add(others, len(of_value))
            self.hash_runs.drop(row, len(of_value), hash_run)
            values[of_value] = after

    def _has(self, generation: Generation, value: int, row: int) -> bool:
        """Return whether an engine has the blocks with this value."""
        hash_run = value if value < _GROUP else generation.groups[value - _GROUP].hash_runs.get(row, 0)
        return self.hash_runs.has(row, hash_run)

    def _become_searchable(self) -> None:
        """Follow evictions from now on: that takes more memory and time, and is not needed without them."""
        self.is_searchable = True
        self.old.log.make_searchable()
        if not self.young.log.make_searchable():
            self._rotate()

    def _is_full(self, num_new: int) -> bool:
        return (
            not self.young.log.has_room(num_new)
            or self.young.groups.num_bytes > self._max_group_bytes
            or self.hash_runs.num_new > _MAX_RUNS
        )

    def _rotate(self) -> None:
        """Forget the old generation and begin a young one, of the size that the engines' caches need."""
        self._swept.append(self.old.groups)
        # A block takes 15 bytes, or 26 with the table of single blocks that evictions need; so with evictions the same
        # memory holds 4 to 8 million blocks instead of 7 to 14.
        block_bytes = SEARCHABLE_BLOCK_BYTES if self.is_searchable else BLOCK_BYTES
        max_blocks = max(min(self.hash_runs.num_blocks, int(self._max_log_bytes / block_bytes)), _MIN_ENTRIES)
        self.old, self.young = self.young, Generation(max_blocks, is_searchable=self.is_searchable)
        self.hash_runs.recycle()


def _runs(log: BlockLog, piece: LoggedBlocks, offset: int) -> list[Run]:
    """Return the runs of a piece; ``offset`` is added to the values."""
    begin, end, position = piece
    values = log.values[position : position + end - begin]
    runs, first = [], 0
    for change in (*(values[1:] != values[:-1]).nonzero()[0].tolist(), end - begin - 1):
        last = change + 1
        runs.append(Run(begin + first, begin + last, values.item(first) + offset, position + first))
        first = last
    return runs

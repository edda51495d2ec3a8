"""Remembers which prefixes each engine probably has in its KV cache: those of its recent picks. No I/O."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tokenloom.request.prefix_schedule import LEADING_BLOCKS, MAX_HASHES
from tokenloom.services.runtime.placement.engine_columns import IntColumn

from .block_log import BLOCK_BYTES, SEARCHABLE_BLOCK_BYTES, BlockHolders, BlockLog, HashRuns, LoggedBlocks
from .hash_table import Values, Words, words_of

MAX_BLOCKS = 1 << 16
"""Blocks remembered of one engine at most."""
_MIN_ENTRIES = 1 << 12
_LOG_SHARE = 0.75  # of the bytes; the rest is for groups
_MAX_RUNS = 1 << 16  # begun in one generation
_GROUP = 1 << 31  # values from here on number groups
_OLD = 1 << 40  # added to values of the old generation


class IndexGeneration:
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


class NativePart(Protocol):
    """Does what the methods of an index of the same names do, with the same results."""

    def lookup(self, index: "PrefixIndex", words: Words, num_rows: int) -> tuple[Path, IntColumn | None]: ...

    def add(self, index: "PrefixIndex", path: Path, num_blocks: int, row: int, newest: int) -> None: ...


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
        native: Works on the same arrays; None: Python does.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_log_bytes = int(max_bytes * _LOG_SHARE / 2)
        self._max_group_bytes = int(max_bytes * (1 - _LOG_SHARE) / 2)
        self.hash_runs = HashRuns()
        self.is_searchable = False  # what is remembered from the first eviction on
        self.young, self.old = (IndexGeneration(0, is_searchable=False) for _ in range(2))
        self.native: NativePart | None = None

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
                rows = owner.take(generation.groups.members(value - _GROUP))
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
        newest = self.hash_runs.newest(row)
        if self.native is not None and len(path.words) <= MAX_HASHES:
            self.native.add(self, path, num_blocks, row, newest)
        else:
            self._add(path, num_blocks, row, newest)
        self.hash_runs.trim(row)

    def _add(self, path: Path, num_blocks: int, row: int, newest: int) -> None:
        """Add an engine to blocks. ``newest``: the run to which they belong from now on."""
        num_known, log = path.num_known, self.young.log
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
            return self._with_group(value - _GROUP, row, newest, num_blocks, is_old)
        owner = hash_runs.owner.item(value)
        if value != newest:
            hash_runs.move(row, num_blocks, value)
        if owner in (-1, row):
            return newest
        return _GROUP + groups.add([value, newest], num_blocks)

    def _with_group(self, number: int, row: int, newest: int, num_blocks: int, is_old: bool) -> int:
        groups, owner = self.young.groups, self.hash_runs.owner
        members = (self.old if is_old else self.young).groups.members(number)
        rows = owner.take(members)
        found = (rows == row).nonzero()[0]
        at = found.item(0) if len(found) else -1
        before = members.item(at) if at >= 0 else 0
        # What was forgotten must not come into the young generation: the number of its run will be given out again.
        others = members[(rows >= 0) & (rows != row)]
        if before != newest:
            self.hash_runs.move(row, num_blocks, before)
        if not is_old:
            if before == newest:
                return _GROUP + number
            if num_blocks == groups.num_blocks[number]:
                groups.put(number, at, newest, owner)
                return _GROUP + number
            groups.leave(number, num_blocks)
        return _GROUP + groups.add([*others.tolist(), newest], num_blocks)

    def _drop(self, generation: IndexGeneration, positions: Values, row: int) -> None:
        """Remove an engine from the blocks at some positions."""
        groups, values, owner = generation.groups, generation.log.values, self.hash_runs.owner
        present = values[positions]
        for value in np.unique(present).tolist():
            of_value, hash_run, after = positions[present == value], value, 0
            if value >= _GROUP:
                members = groups.members(value - _GROUP)
                rows = owner.take(members)
                found = members[rows == row]
                if not len(found):
                    continue
                hash_run, others = found.item(0), members[(rows >= 0) & (rows != row)]
                groups.leave(value - _GROUP, len(of_value))
                after = _GROUP + groups.add(others, len(of_value)) if len(others) else 0
            elif not self.hash_runs.has(row, value):
                continue
            self.hash_runs.drop(row, len(of_value), hash_run)
            values[of_value] = after

    def _has(self, generation: IndexGeneration, value: int, row: int) -> bool:
        """Return whether an engine has the blocks with this value."""
        if value < _GROUP:
            return self.hash_runs.has(row, value)
        return row in self.hash_runs.owner.take(generation.groups.members(value - _GROUP))

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
        # A block takes 15 bytes, or 26 with the table of single blocks that evictions need; so with evictions the same
        # memory holds 4 to 8 million blocks instead of 7 to 14.
        block_bytes = SEARCHABLE_BLOCK_BYTES if self.is_searchable else BLOCK_BYTES
        max_blocks = max(min(self.hash_runs.num_blocks, int(self._max_log_bytes / block_bytes)), _MIN_ENTRIES)
        self.old, self.young = self.young, IndexGeneration(max_blocks, is_searchable=self.is_searchable)
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

"""Remembers which prefixes each engine probably has in its KV cache: those of its recent picks. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenloom.request.prefix_schedule import MAX_HASHES
from tokenloom.services.runtime.placement.engine_columns import IntColumn

from .block_groups import Groups
from .hash_table import MAX_LOAD, SLOT_BYTES, HashTable, Keys, Slots, Values, keys_of
from .stretches import Stretches

MAX_BLOCKS = 1 << 16
"""Blocks remembered of one engine at most."""
_MIN_ENTRIES = 1 << 12
_TABLE_SHARE = 0.75  # of the bytes; the rest is for groups
_MAX_STRETCHES = 1 << 16  # begun in one generation
_GROUP = 1 << 31  # values from here on number groups
_OLD = 1 << 40  # added to values of the old generation
_NO_SLOTS = np.empty(0, np.int64)
_SWEPT_GROUPS = 256  # freed at each pick: all at once would take too long


class _Generation:
    """Holds hashes of blocks. Their values: 0: no engine has the block; below ``_GROUP``: the stretch of the only
    engine that has it; otherwise a group."""

    def __init__(self, max_entries: int) -> None:
        self.table = HashTable(max_entries)
        self.groups = Groups()

    def leading(self, keys: Keys) -> tuple[Slots, Values]:
        """Return the slots and values of the blocks at the beginning of a prompt that are known."""
        if not len(keys) or not self.table.has(keys, 0):
            return _NO_SLOTS, _NO_SLOTS
        slots, values = self.table.find(keys)
        missing = slots < 0
        end = missing.argmax()
        return (slots[:end], values[:end]) if missing[end] else (slots, values)


@dataclass(frozen=True, slots=True)
class Path:
    """Shows the blocks of a prompt as the index has them, until the index changes.

    Attributes:
        keys: All blocks.
        slots: Of the leading blocks, in the young generation.
        runs: Begin, end and value of consecutive blocks with the same engines.
    """

    keys: Keys
    slots: Slots
    runs: list[tuple[int, int, int]]


class PrefixIndex:
    """Finds all engines that have the beginning of a prompt, whatever their number.

    A block is kept once, however many engines have it, in 8 bytes: its hash and who has it. Consecutive blocks that the
    same engines have share one group, as in a radix tree. Hashes are chained: a block's stands for all of its prefix,
    so the blocks of a prompt that an engine has are always the leading ones.

    Two bounds decide what is kept. Of each engine, at most as many blocks as its cache holds, in eighths that are
    forgotten together, the least recently picked first (:class:`.Stretches`). Of all engines, as many blocks as fit
    into ``max_bytes``: a young generation takes every block that is picked, and when it is full, it becomes the old
    one, and the old one is forgotten. Thus between half and all of the capacity holds the most recently picked blocks.
    256 MiB are 9 to 19 million different blocks of any number of engines. A small fleet has small generations.

    Args:
        max_bytes: Of memory, about.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_entries = int(max_bytes * _TABLE_SHARE / 2 / SLOT_BYTES * MAX_LOAD)
        self._max_group_bytes = int(max_bytes * (1 - _TABLE_SHARE) / 2)
        self._stretches = Stretches()
        self._young, self._old = _Generation(0), _Generation(0)
        self._swept: list[Groups] = []

    def open(self, row: int, num_blocks: int) -> None:
        """Add an engine, or forget what was remembered of the one in its row. ``num_blocks``: what its cache holds."""
        self._stretches.open(row, min(num_blocks, MAX_BLOCKS))

    def close(self, row: int) -> None:
        """Remove an engine."""
        self._stretches.close(row)

    def find(self, hashes: Sequence[int]) -> Path:
        """Look a prompt up. ``hashes``: of its blocks, from the first on."""
        return self._find(keys_of(hashes if len(hashes) <= MAX_HASHES else hashes[:MAX_HASHES]))

    def num_blocks(self, path: Path, num_rows: int) -> IntColumn | None:
        """Return how many blocks of a prompt each engine has, by row, shape [num_rows]; None if no engine has any."""
        counts: IntColumn | None = None
        owner = self._stretches.owner
        for begin, end, value in path.runs:
            generation, value = (self._old, value - _OLD) if value >= _OLD else (self._young, value)
            if value == 0:
                break
            rows = generation.groups[value - _GROUP].rows(owner) if value >= _GROUP else owner[value : value + 1]
            rows = rows[rows >= 0]
            if counts is None:
                counts = np.zeros(num_rows, np.int64)
            rows = rows[counts[rows] == begin]
            if not len(rows):
                break
            counts[rows] = end
        return counts

    def add(self, path: Path, row: int) -> None:
        """Remember that an engine will have the blocks of a prompt, or as many as its cache holds."""
        num_blocks = min(len(path.keys), self._stretches.limit(row))
        if not num_blocks:
            return
        if self._is_full(num_blocks - len(path.slots)):
            self._rotate()
            path = self._find(path.keys)
        num_known = min(len(path.slots), num_blocks)
        newest = self._stretches.newest(row)
        values = np.empty(num_blocks - num_known, np.int64)  # of the blocks that are new in this generation
        for begin, end, before in path.runs:
            end = min(end, num_blocks)
            if begin >= end:
                break
            after = self._with(before, row, newest, end - begin)
            if begin < num_known and after != before:
                self._young.table.put(path.slots[begin : min(end, num_known)], after)
            if end > num_known:
                values[max(begin - num_known, 0) : end - num_known] = after
        if len(values):
            self._young.table.insert(path.keys.part(slice(num_known, num_blocks)), values)
        self._stretches.trim(row)
        if self._swept and not self._swept[-1].take(_SWEPT_GROUPS):
            self._swept.pop()

    def store(self, parent: int | None, blocks: Sequence[int], row: int) -> None:
        """Remember blocks that an engine's cache has stored, each of which follows the one before it.

        They are left out if their engine is not known to have ``parent``, the block before them (None: they begin a
        prompt), because they would not count; and if ``parent`` is not in the young generation, or would not be after
        this, because no block is there without those before it. Most were picked: then nothing changes.
        """
        value = self._young.table.get(blocks[-1])
        if value is not None and self._has(self._young, value, row):
            return
        if parent is None:
            self.add(self.find(blocks), row)
            return
        path = self.find([parent, *blocks])
        is_full = self._is_full(len(path.keys) - len(path.slots))
        if len(path.slots) and not is_full and self._has(self._young, path.runs[0][2], row):
            self.add(path, row)

    def remove(self, hashes: Sequence[int], row: int) -> None:
        """Forget blocks, in any order, that an engine's cache has evicted."""
        keys = keys_of(hashes)
        slots, values = self._young.table.find(keys)
        self._drop(self._young, slots, values, row)
        slots, values = self._old.table.find(keys.part(slots < 0))
        self._drop(self._old, slots, values, row)

    def _find(self, keys: Keys) -> Path:
        slots, values = self._young.leading(keys)
        num_known, num_blocks = len(slots), len(keys)
        if num_known < num_blocks:
            _, old = self._old.leading(keys.part(slice(num_known, None)))
            unknown = np.zeros(num_blocks - num_known - len(old), np.int64)
            values = np.concatenate([values, old + _OLD, unknown])
        if not num_blocks:
            return Path(keys, slots, [])
        if values[0] == values[-1] and (values == values[0]).all():
            return Path(keys, slots, [(0, num_blocks, int(values[0]))])
        begins = [0, *((values[1:] != values[:-1]).nonzero()[0] + 1).tolist()]
        ends = [*begins[1:], num_blocks]
        return Path(keys, slots, list(zip(begins, ends, values[begins].tolist(), strict=True)))

    def _with(self, value: int, row: int, newest: int, num_blocks: int) -> int:
        """Return the value, in the young generation, of blocks that the engine in ``row`` has too from now on."""
        stretches, groups, is_old = self._stretches, self._young.groups, value >= _OLD
        if is_old:
            value -= _OLD
        if value >= _GROUP:
            return self._with_group(value, row, newest, num_blocks, is_old)
        owner = int(stretches.owner[value]) if value else -1
        if value != newest:
            stretches.move(row, num_blocks, value if owner == row else None)
        if owner in (-1, row):
            return newest
        return _GROUP + groups.add({owner: value, row: newest}, num_blocks)

    def _with_group(self, value: int, row: int, newest: int, num_blocks: int, is_old: bool) -> int:
        groups, group = self._young.groups, (self._old if is_old else self._young).groups[value - _GROUP]
        before = group.stretches.get(row)
        if before != newest:
            self._stretches.move(row, num_blocks, before)
        if not is_old:
            if before == newest:
                return value
            if num_blocks == group.num_blocks:
                groups.put(value - _GROUP, row, newest)
                return value
            members = dict(group.stretches)
            groups.leave(value - _GROUP, num_blocks)
        else:  # what was forgotten must not come into the young generation
            members = {each: stretch for each, stretch in group.stretches.items() if self._stretches.has(each, stretch)}
        members[row] = newest
        return _GROUP + groups.add(members, num_blocks)

    def _drop(self, generation: _Generation, slots: Slots, values: Values, row: int) -> None:
        """Remove an engine from the blocks in some slots."""
        groups = generation.groups
        for value in np.unique(values[slots >= 0]).tolist():
            if not self._has(generation, value, row):
                continue
            of_value, stretch, after = slots[(values == value) & (slots >= 0)], value, 0
            if value >= _GROUP:
                others = dict(groups[value - _GROUP].stretches)
                stretch = others.pop(row)
                groups.leave(value - _GROUP, len(of_value))
                after = _GROUP + groups.add(others, len(of_value))
            self._stretches.drop(row, len(of_value), stretch)
            generation.table.put(of_value, after)

    def _has(self, generation: _Generation, value: int, row: int) -> bool:
        """Return whether an engine has the blocks with this value."""
        stretch = value if value < _GROUP else generation.groups[value - _GROUP].stretches.get(row, 0)
        return self._stretches.has(row, stretch)

    def _is_full(self, num_new: int) -> bool:
        table = self._young.table
        return (
            table.num_entries + num_new > table.max_entries
            or self._young.groups.num_bytes > self._max_group_bytes
            or self._stretches.num_new > _MAX_STRETCHES
        )

    def _rotate(self) -> None:
        """Forget the old generation and begin a young one, of the size that the engines' caches need."""
        self._swept.append(self._old.groups)
        max_entries = max(min(self._stretches.num_blocks, self._max_entries), _MIN_ENTRIES)
        self._old, self._young = self._young, _Generation(max_entries)
        self._stretches.recycle()

"""Maps 64-bit hashes to numbers in a fixed number of bytes, hundreds of hashes at a time. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Hashes: TypeAlias = NDArray[np.uint64]
Slots: TypeAlias = NDArray[np.intp]
Values: TypeAlias = NDArray[np.int32]

SLOT_BYTES = 8
"""A tag of four bytes and a value of four."""
MAX_LOAD = 0.75
_WIDTH = 8  # slots of a bucket: their tags fill half of a cache line
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Keys:
    """Holds hashes as the table compares them, shapes [n].

    Attributes:
        places: 32 bits that choose the bucket, uint64.
        tags: 32 bits that are kept, uint32; 0 marks an empty slot and does not occur.
    """

    places: NDArray[np.uint64]
    tags: NDArray[np.uint32]

    def __len__(self) -> int:
        return len(self.tags)

    def part(self, part: "slice | NDArray[np.bool_]") -> "Keys":
        """Return some of the keys."""
        return Keys(self.places[part], self.tags[part])


def keys_of(hashes: Sequence[int]) -> Keys:
    """Return the keys of ``hashes``, mixed, because nothing is known of how their bits are distributed."""
    mixed = np.array(hashes, np.uint64) * _MULTIPLIER
    mixed ^= mixed >> _HALF
    mixed *= _MULTIPLIER
    tags = (mixed & _LOW).astype(np.uint32)
    return Keys(mixed >> _HALF, np.maximum(tags, 1, out=tags))


class HashTable:
    """Keeps hashes with one value each, and forgets none: whoever fills it begins another one.

    Buckets of eight slots are searched and filled in turn, beginning with the one that the hash chooses. A slot keeps
    32 bits of the hash, and its bucket stands for 20 or more: hashes are mistaken for each other once in 10^9 searches.

    Attributes:
        max_entries: It works well with so many hashes, and is a quarter empty then.
        num_entries: Hashes that it has.
        values: By slot, int32, to be read and written.
    """

    def __init__(self, max_entries: int) -> None:
        self._num_buckets = int(max_entries / MAX_LOAD / _WIDTH) + 1
        self.max_entries = max_entries
        self.num_entries = 0
        self._tags = np.zeros((self._num_buckets, _WIDTH), np.uint32)  # the system gives memory where it is written
        self._all_tags = self._tags.reshape(-1)
        self.values: Values = np.zeros(self._num_buckets * _WIDTH, np.int32)

    def has(self, keys: Keys, index: int) -> bool:
        """Return whether one hash is there: faster than :meth:`find` for a few."""
        bucket = (int(keys.places[index]) * self._num_buckets) >> 32
        tag = int(keys.tags[index])
        while True:
            tags = self._tags[bucket].tolist()
            if tag in tags:
                return True
            if not tags[-1]:
                return False
            bucket = (bucket + 1) % self._num_buckets

    def find(self, keys: Keys) -> Slots:
        """Return the slots of the hashes, shape [n]; -1 for those that are not there."""
        buckets = self._buckets(keys.places)
        slots, is_there, is_full = self._look(buckets, keys.tags)
        slots[~is_there] = -1
        pending = np.flatnonzero(is_full & ~is_there)
        while len(pending):  # they may be in the next bucket
            buckets[pending] = (buckets[pending] + 1) % self._num_buckets
            found, is_there, is_full = self._look(buckets[pending], keys.tags[pending])
            slots[pending[is_there]] = found[is_there]
            pending = pending[is_full & ~is_there]
        return slots

    def insert(self, keys: Keys, values: Values) -> None:
        """Add hashes that are not there."""
        buckets = self._buckets(keys.places)
        left = np.arange(len(values))
        self.num_entries += len(left)
        while len(left):
            rows = buckets[left]
            used = (self._tags[rows] != 0).sum(axis=1)
            has_room = used < _WIDTH
            slots = np.where(has_room, rows * _WIDTH + used, 0)
            takers, wanted = left[has_room], slots[has_room]
            self.values[wanted] = takers  # of several that want one slot, the last gets it
            won = self.values[wanted] == takers
            takers, wanted = takers[won], wanted[won]
            self._all_tags[wanted] = keys.tags[takers]
            self.values[wanted] = values[takers]
            buckets[left[~has_room]] = (rows[~has_room] + 1) % self._num_buckets
            has_room[has_room] = won
            left = left[~has_room]

    def _buckets(self, places: NDArray[np.uint64]) -> Slots:
        return ((places * np.uint64(self._num_buckets)) >> _HALF).astype(np.intp)

    def _look(self, buckets: Slots, tags: NDArray[np.uint32]) -> tuple[Slots, NDArray[np.bool_], NDArray[np.bool_]]:
        """Return for each bucket the slot to which the tag belongs, if it is there; whether it is, and whether the
        bucket is full."""
        rows = self._tags[buckets]
        equal = rows == tags[:, None]
        columns = equal.argmax(axis=1)
        slots = buckets * _WIDTH + columns
        return slots, self._all_tags[slots] == tags, rows[:, -1] != 0

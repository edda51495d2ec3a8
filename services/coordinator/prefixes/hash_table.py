"""Maps 64-bit hashes to numbers in a fixed number of bytes, hundreds of hashes at a time. No I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
Slots: TypeAlias = NDArray[np.int64]
Values: TypeAlias = NDArray[np.int64]

SLOT_BYTES = 8
"""A word with 32 bits of the hash above and the value below."""
MAX_VALUE = (1 << 32) - 1
MAX_LOAD = 0.75
_WIDTH = 8  # slots of a bucket: a cache line
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4)
_HALF, _NOT_EMPTY = np.uint64(32), np.uint64(1 << 32)


@dataclass(frozen=True, slots=True)
class Keys:
    """Holds hashes as the table compares them, shapes [n].

    Attributes:
        places: 32 bits that choose the bucket.
        tags: 32 bits that are kept, in the upper half of a word; never 0, which marks an empty slot.
    """

    places: Words
    tags: Words

    def __len__(self) -> int:
        return len(self.tags)

    def part(self, part: "slice | NDArray[np.bool_]") -> "Keys":
        """Return some of the keys."""
        return Keys(self.places[part], self.tags[part])


def keys_of(hashes: Sequence[int]) -> Keys:
    """Return the keys of ``hashes``, mixed, because nothing is known of how their bits are distributed."""
    mixed = np.array(hashes, np.uint64) * _MULTIPLIER
    places = mixed >> _HALF
    mixed ^= places
    mixed <<= _HALF
    mixed |= _NOT_EMPTY
    return Keys(places, mixed)


class HashTable:
    """Keeps hashes with one value each, and forgets none: its owner begins another one when it is full.

    Buckets of eight slots are searched and filled in turn, beginning with the one that the hash chooses. A slot keeps
    31 bits of the hash, and its bucket stands for 20 more: of 10^8 searches in a full table one finds another hash.

    Attributes:
        max_entries: It works well with so many hashes, and is a quarter empty then.
        num_entries: Hashes that it has.
    """

    def __init__(self, max_entries: int) -> None:
        self._num_buckets = int(max_entries / MAX_LOAD / _WIDTH) + 1
        self.max_entries = max_entries
        self.num_entries = 0
        self._rows: Words = np.zeros((self._num_buckets, _WIDTH), np.uint64)  # memory is taken where it is written
        self._words = self._rows.reshape(-1)
        self._used = np.zeros(self._num_buckets, np.int8)

    def has(self, keys: Keys, index: int) -> bool:
        """Return whether one hash is there: faster than :meth:`find` for a few."""
        return self._get(int(keys.places[index]), int(keys.tags[index]) >> 32) is not None

    def get(self, block_hash: int) -> int | None:
        """Return the value of one hash, None if it is not there."""
        mixed = (block_hash * int(_MULTIPLIER)) & ((1 << 64) - 1)
        place = mixed >> 32
        return self._get(place, (mixed & MAX_VALUE) ^ place | 1)

    def _get(self, place: int, tag: int) -> int | None:
        bucket = (place * self._num_buckets) >> 32
        while True:
            words = self._rows[bucket].tolist()
            for word in words:
                if word >> 32 == tag:
                    return int(word) & MAX_VALUE
            if not words[-1]:
                return None
            bucket = (bucket + 1) % self._num_buckets

    def find(self, keys: Keys) -> tuple[Slots, Values]:
        """Return the slots of the hashes and their values, shapes [n]; -1 and 0 for those that are not there."""
        buckets = self._buckets(keys)
        hits, values, rows = self._look(buckets, keys.tags)
        if len(hits) == len(buckets):
            return buckets * _WIDTH + (hits & (_WIDTH - 1)), values
        slots, all_values = np.full(len(buckets), -1, np.int64), np.zeros(len(buckets), np.int64)
        pending = np.arange(len(buckets))
        while True:
            keys_found = pending[hits // _WIDTH]
            slots[keys_found] = buckets[keys_found] * _WIDTH + hits % _WIDTH
            all_values[keys_found] = values
            pending = pending[(rows[:, -1] != 0) & (slots[pending] < 0)]
            if not len(pending):
                return slots, all_values
            buckets[pending] = (buckets[pending] + 1) % self._num_buckets  # they may be in the next bucket
            hits, values, rows = self._look(buckets[pending], keys.tags[pending])

    def insert(self, keys: Keys, values: Values) -> None:
        """Add hashes that are not there."""
        buckets, words = self._buckets(keys), keys.tags | values.view(np.uint64)
        self.num_entries += len(words)
        while len(words):
            used = self._used[buckets]
            has_room = used < _WIDTH
            slots = buckets * _WIDTH + used
            if not has_room[has_room.argmin()]:
                slots *= has_room
            self._words[slots[has_room]] = words[has_room]
            won = has_room & (self._words.take(slots) == words)  # of several that want one slot, the last gets it
            if won[won.argmin()]:
                self._used[buckets] = used + 1
                return
            self._used[buckets[won]] += 1
            buckets = np.where(has_room, buckets, (buckets + 1) % self._num_buckets)[~won]
            words = words[~won]

    def put(self, slots: Slots, value: int) -> None:
        """Give all of some slots one value."""
        self._words[slots] = ((self._words[slots] >> _HALF) << _HALF) | np.uint64(value)

    def _buckets(self, keys: Keys) -> Slots:
        buckets = keys.places * np.uint64(self._num_buckets)
        buckets >>= _HALF
        return buckets.view(np.int64)

    def _look(self, buckets: Slots, tags: Words) -> tuple[Slots, Values, Words]:
        """Return where in the buckets the tags are (8 x index + place in the bucket), their values, and the buckets,
        shape [n, 8]."""
        rows = self._rows.take(buckets, axis=0)
        differences = (rows ^ tags[:, None]).reshape(-1)
        hits = (differences <= MAX_VALUE).nonzero()[0]
        return hits, differences[hits].view(np.int64), rows

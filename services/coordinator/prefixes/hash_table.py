"""Maps 64-bit words to numbers in a fixed number of bytes, one or thousands at a time. No I/O."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.uint64]
"""Hashes whose bits are mixed, shape [n]."""
Values: TypeAlias = NDArray[np.int64]
_Tags: TypeAlias = NDArray[np.uint64]

MAX_VALUE = (1 << 32) - 1
MAX_LOAD = 0.75
_WIDTH = 8  # slots of a bucket: a cache line
_SLOT_BYTES = 8
BYTES_PER_ENTRY = _SLOT_BYTES / MAX_LOAD
# Operands of arrays are arrays: NumPy takes a microsecond longer for a number of Python.
_MULTIPLIER = np.array(
    0x9E3779B97F4A7C15, np.uint64
)  # of Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4)
_HALF, _NOT_EMPTY = np.array(32, np.uint64), np.array(1 << 32, np.uint64)


NO_WORDS: Words = np.zeros(0, np.uint64)


def words_of(hashes: Sequence[int] | Words) -> Words:
    """Return ``hashes``, mixed, because nothing is known of how their bits are distributed."""
    words: Words = np.array(hashes, np.uint64) * _MULTIPLIER
    return words


class HashTable:
    """Keeps words with one value each, and forgets none: its owner begins another one when it is full.

    Buckets of eight slots are searched and filled in turn, beginning with the one that the upper half of the word
    chooses. A slot keeps 31 other bits, the tag, above the value, and its bucket stands for 20 more: of 10^8 searches
    in a full table one finds another word.

    Attributes:
        max_entries: It works well with so many words, and is a quarter empty then.
        num_entries: Words that it has.
        num_buckets: Buckets of eight slots.
        rows: The slots, shape [num_buckets, 8].
        used: How many of each bucket are used, shape [num_buckets].
    """

    def __init__(self, max_entries: int) -> None:
        self.num_buckets = int(max_entries / MAX_LOAD / _WIDTH) + 1
        self.max_entries = max_entries
        self.num_entries = 0
        self.rows: NDArray[np.uint64] = np.zeros((self.num_buckets, _WIDTH), np.uint64)  # takes memory as it fills
        self._slots = self.rows.reshape(-1)
        self.used = np.zeros(self.num_buckets, np.int8)

    def get(self, word: int) -> int:
        """Return the value of one word; -1: it is not there."""
        bucket, tag = self._place(word)
        while True:
            slots = self.rows[bucket].tolist()
            for slot in slots:
                if slot >> 32 == tag:
                    return int(slot & MAX_VALUE)
            if not slots[-1]:
                return -1
            bucket = (bucket + 1) % self.num_buckets

    def add(self, word: int, value: int) -> None:
        """Add one word that is not there."""
        bucket, tag = self._place(word)
        while (used := int(self.used[bucket])) == _WIDTH:
            bucket = (bucket + 1) % self.num_buckets
        self.rows[bucket, used] = tag << 32 | value
        self.used[bucket] = used + 1
        self.num_entries += 1

    def find(self, words: Words) -> Values:
        """Return the values of words, shape [n]; -1 for those that are not there."""
        buckets, tags = self._places(words)
        values, pending = np.full(len(words), -1, np.int64), np.arange(len(words))
        while len(pending):
            rows = self.rows[buckets] ^ tags[:, None]
            nearest = rows.min(axis=1)
            is_found = nearest <= MAX_VALUE
            values[pending[is_found]] = nearest[is_found]
            goes_on = ~is_found & (rows[:, -1] != tags)  # the bucket is full: it may be in the next one
            pending, tags, buckets = pending[goes_on], tags[goes_on], (buckets[goes_on] + 1) % self.num_buckets
        return values

    def insert(self, words: Words, values: Values) -> None:
        """Add words that are not there."""
        buckets, tags = self._places(words)
        slots_wanted = tags | values.view(np.uint64)
        self.num_entries += len(words)
        while len(slots_wanted):
            used = self.used[buckets]
            has_room = used < _WIDTH
            slots = (buckets * _WIDTH + used) * has_room
            self._slots[slots[has_room]] = slots_wanted[has_room]
            won = has_room & (self._slots[slots] == slots_wanted)  # of several that want one slot, the last gets it
            self.used[buckets[won]] += 1
            buckets = np.where(has_room, buckets, (buckets + 1) % self.num_buckets)[~won]
            slots_wanted = slots_wanted[~won]

    def _place(self, word: int) -> tuple[int, int]:
        """Return the first bucket of a word and its tag, 32 bits; never 0, which marks an empty slot."""
        upper = word >> 32
        return upper * self.num_buckets >> 32, (word ^ upper) & MAX_VALUE | 1

    def _places(self, words: Words) -> tuple[Values, _Tags]:
        """Return first buckets and tags, the latter in the upper half of a word, shapes [n]."""
        upper = words >> _HALF
        buckets = upper * np.uint64(self.num_buckets) >> _HALF
        return buckets.view(np.int64), (words ^ upper) << _HALF | _NOT_EMPTY

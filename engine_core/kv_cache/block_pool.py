"""The pool of KV blocks: who holds a block, which are free, and which free ones can still be hit."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol


class FreeList:
    """Free block ids in the order they are taken: those without content first, then cached ones, longest free first."""

    def __init__(self, num_blocks: int) -> None:
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blank) + len(self._cached)

    def __iter__(self) -> Iterator[int]:
        yield from reversed(self._blank)
        yield from self._cached

    def add(self, block_id: int, *, cached: bool) -> None:
        if cached:
            self._cached[block_id] = None
        else:
            self._blank.append(block_id)

    def pop(self) -> int:
        if self._blank:
            return self._blank.pop()
        return self._cached.popitem(last=False)[0]

    def remove_cached(self, block_id: int) -> None:
        """A free block was hit."""
        del self._cached[block_id]

    def blank_all(self) -> None:
        """No free block has content any more."""
        self._blank.extend(reversed(self._cached))
        self._cached.clear()


class EvictionListener(Protocol):
    """Hears what can be found no more. Called from the thread that steps."""

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        """A block with content is given to somebody else, who writes to it in the coming step at the earliest."""

    def forgot_all(self) -> None:
        """All content counts for nothing any more."""


class BlockPool:
    """Blocks are plain ids in [0, num_blocks); a block is free when nobody refers to it.

    A registered block is found by the hash of its content until it is given to somebody else.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.generations = [0] * num_blocks
        """Grows when a block is given out anew: who remembers (id, generation) can tell that its content is gone."""
        self.listeners: list[EvictionListener] = []
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._free = FreeList(num_blocks)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds."""
        return 1.0 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """Takes ``count`` blocks, the least useful first. The caller has checked ``num_free``."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        block_ids = [self._free.pop() for _ in range(count)]
        for block_id in block_ids:
            self._unregister(block_id)
            self.ref_counts[block_id] = 1
            self.generations[block_id] += 1
        return block_ids

    def find(self, block_hash: bytes) -> int | None:
        """The block with this content, if there is one; it is not held yet."""
        return self._by_hash.get(block_hash)

    def count_free(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody holds: sharing them takes them off the free list."""
        return sum(not self.ref_counts[block_id] for block_id in block_ids)

    def share(self, block_ids: Iterable[int]) -> None:
        """Holds blocks that were found, until as many calls of ``release``."""
        for block_id in block_ids:
            if not self.ref_counts[block_id]:
                self._free.remove_cached(block_id)
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Gives up one reference to each block of a sequence; its last block will be evicted first."""
        for block_id in reversed(block_ids):
            self.ref_counts[block_id] -= 1
            assert self.ref_counts[block_id] >= 0, f"block {block_id} is released twice"
            if not self.ref_counts[block_id]:
                self._free.add(block_id, cached=self._hashes[block_id] is not None)

    def register(self, block_id: int, block_hash: bytes) -> bool:
        """Lets a held block be found. The first block of a content keeps the name: equal ones stay private, False."""
        if block_hash in self._by_hash:
            return False
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        return True

    def forget_all(self) -> None:
        """No block can be found any more; held ones stay held."""
        for block_id in self._by_hash.values():
            self._hashes[block_id] = None
        self._by_hash.clear()
        self._free.blank_all()
        for listener in self.listeners:
            listener.forgot_all()

    def _unregister(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block_id] = None
            for listener in self.listeners:
                listener.evicted(block_id, block_hash)

"""Finds the longest prefix whose blocks every group of a model still has.

The blocks of groups have keys of their own, while KV events name one hash for each block of tokens.
"""

from collections.abc import Callable, Sequence

from ..data.kv_events import KVEventLog
from ..data.kv_groups import NULL_BLOCK, first_seen_block


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the key under which a group's block with this hash is found."""
    return block_hash + bytes((group,))


class FirstGroupEvents:
    """Records what happens to the blocks of the first group, which sees most tokens. Implements
    :class:`~.block_pool.EvictionListener`.

    The other groups keep less: a prefix of which all blocks are stored may be hit only in part.
    """

    def __init__(self, events: KVEventLog) -> None:
        self._events = events

    def evicted(self, block_id: int, block_hash: bytes) -> None:
        self.forgot(block_hash)

    def forgot(self, block_hash: bytes) -> None:
        # The last byte is the group. Subscribers know one hash for each block of tokens, so eight groups would report
        # each block eight times.
        if block_hash[-1] == 0:
            self._events.forgot(block_hash[:-1])

    def forgot_all(self) -> None:
        self._events.forgot_all()


def find_prefix(
    hash_of: Callable[[int], bytes],
    find: Callable[[bytes], int | None],
    windows: Sequence[int | None],
    limit: int,
    block_size: int,
) -> list[int]:
    """Return the block table of the longest cached prefix, [n * groups]; ``NULL_BLOCK`` where no later token looks.

    Args:
        hash_of: Returns the hash of the block of tokens at an index below ``limit``.
        find: Returns the block with this key.
        windows: The window of each group.
        limit: Most blocks of tokens that may be hit.
        block_size: Tokens per block.
    """
    search = _Search(hash_of, find, windows, block_size)
    length = search.longest(limit)
    first = [first_seen_block(window, length * block_size, block_size) for window in windows]
    table = []
    for index in range(length):
        for group in range(len(windows)):
            block_id = search.find(index, group) if index >= first[group] else NULL_BLOCK
            assert block_id is not None
            table.append(block_id)
    return table


class _Search:
    def __init__(
        self,
        hash_of: Callable[[int], bytes],
        find: Callable[[bytes], int | None],
        windows: Sequence[int | None],
        block_size: int,
    ) -> None:
        self._hash_of = hash_of
        self._find = find
        self._block_size = block_size
        self._members: dict[int | None, list[int]] = {}
        for group, window in enumerate(windows):
            self._members.setdefault(window, []).append(group)

    def find(self, index: int, group: int) -> int | None:
        return self._find(group_key(self._hash_of(index), group))

    def longest(self, limit: int) -> int:
        """Shorten the prefix until no window asks for less; a shorter one may begin outside another window's blocks."""
        length = self._full_length(limit)
        while length:
            # A prefix that one window shortens may end inside a gap of another, so all of them are asked until none
            # shortens it. Each round takes at least one block off, which bounds the loop.
            shortest = min(self._window_length(window, length) for window in self._members)
            if shortest == length:
                break
            length = shortest
        return length

    def _has(self, index: int, window: int | None) -> bool:
        return all(self.find(index, group) is not None for group in self._members[window])

    def _full_length(self, limit: int) -> int:
        if None not in self._members:
            return limit
        return next((index for index in range(limit) if not self._has(index, None)), limit)

    def _window_length(self, window: int | None, length: int) -> int:
        """Return the longest prefix within ``length`` whose last window these groups have."""
        if window is None:
            return length
        index = length - 1
        # Searched from the end, because only the blocks within the last window of the prefix must be cached. A missing
        # block ends the prefix before it, and the window of that shorter prefix is checked next.
        while index >= first_seen_block(window, length * self._block_size, self._block_size):
            if not self._has(index, window):
                length = index
            index -= 1
        return length

"""Gives the blocks of groups keys of their own, while KV events name one hash for each block of tokens."""

from ..data.kv_events import KVEventLog


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

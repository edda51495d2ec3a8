"""Merges events of the prefix cache into what they changed for the placement of prompts. No I/O."""

from collections.abc import Iterable

from tokenloom.request.prefix_schedule import named_within
from tokenloom.v1.engine_pb2 import BlockStored, PrefixChain, PrefixChanges, WatchKVEventsResponse

_HASH_BYTES = 8


def merged(batches: Iterable[WatchKVEventsResponse]) -> PrefixChanges:
    """Return what consecutive batches changed; the caller fills in which batches they are.

    Of a block that came and went several times, the last time counts.
    """
    all_cleared = False
    removed: dict[int, None] = {}
    stored: dict[int, int | None] = {}  # with the named block before
    for batch in batches:
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "block_stored":
                for block, parent in _named(event.block_stored):
                    stored[block] = parent
            elif kind == "block_removed":
                for block_hash in event.block_removed.block_hashes:
                    block = _named_as(block_hash)
                    stored.pop(block, None)
                    removed[block] = None
            else:
                all_cleared = True
                removed.clear()
                stored.clear()
    gone = [block for block in removed if block not in stored]
    return PrefixChanges(all_cleared=all_cleared, removed=gone, stored=_chains(stored))


def _named(event: BlockStored) -> Iterable[tuple[int, int | None]]:
    """Yield the blocks that prompts name, and of each the named one before it."""
    before, hashes = event.num_blocks_before, event.block_hashes
    parent = _named_as(event.named_block_before) if event.HasField("named_block_before") else None
    for num_blocks in named_within(before, len(hashes)):
        block = _named_as(hashes[num_blocks - 1 - before])
        yield block, parent
        parent = block


def _chains(stored: dict[int, int | None]) -> list[PrefixChain]:
    chains: list[PrefixChain] = []
    last: int | None = None
    for block, parent in stored.items():
        if parent is None or parent != last:
            chains.append(PrefixChain(parent=parent))
        chains[-1].blocks.append(block)
        last = block
    return chains


def _named_as(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:_HASH_BYTES], "little")

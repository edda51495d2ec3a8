import asyncio
from collections.abc import AsyncIterator

import pytest

from tokenloom.engine_core.data.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from tokenloom.request.errors import Aborted, InvalidArgument
from tokenloom.request.packed_ids import pack
from tokenloom.services.engine.records.kv_event_feed import MERGED_BATCHES, KVEventFeed
from tokenloom.v1.engine_pb2 import WatchKVEventsResponse


async def take(batches: AsyncIterator[WatchKVEventsResponse], count: int) -> list[int]:
    async with asyncio.timeout(30):
        return [(await anext(batches)).sequence for _ in range(count)]


async def test_events_travel_with_all_they_tell() -> None:
    feed = KVEventFeed(7)
    two, one = bytearray(pack([1, 2, 3, 4])), bytearray(pack([5, 6]))
    feed.publish([BlockStored([b"a", b"b"], None, two, 2, "GPU"), BlockStored([b"c"], b"b", one, 2, "GPU")])
    feed.publish([BlockRemoved([b"a"], "GPU"), AllBlocksCleared()])
    batches = feed.follow(1)
    first, second = await anext(batches), await anext(batches)
    assert (first.sequence, first.engine_epoch, first.time.seconds > 0) == (1, 7, True)
    root, child = (event.block_stored for event in first.events)
    assert (list(root.block_hashes), list(root.token_ids), root.block_size) == ([b"a", b"b"], [1, 2, 3, 4], 2)
    assert list(child.token_ids) == [5, 6]
    assert not root.HasField("parent_block_hash")
    assert (child.parent_block_hash, child.medium) == (b"b", "GPU")
    assert [event.WhichOneof("event") for event in second.events] == ["block_removed", "all_blocks_cleared"]


async def test_a_reader_begins_now_or_at_a_batch_that_is_kept() -> None:
    feed = KVEventFeed(7, capacity=3)
    for _ in range(4):
        feed.publish([AllBlocksCleared()])
    assert await take(feed.follow(2), 3) == [2, 3, 4]
    now = feed.follow(None)
    coming = asyncio.ensure_future(take(now, 1))
    await asyncio.sleep(0)
    feed.publish([AllBlocksCleared()])
    assert await coming == [5]
    assert await take(feed.follow(5), 1) == [5]


@pytest.mark.parametrize("sequence", [0, 3, 99])
async def test_no_batch_that_is_yet_to_come(sequence: int) -> None:
    feed = KVEventFeed(7)
    feed.publish([AllBlocksCleared()])
    with pytest.raises(InvalidArgument, match="must be 1 to 2, not"):
        await anext(feed.follow(sequence))


async def test_who_reads_too_slowly_is_told_what_is_gone() -> None:
    feed = KVEventFeed(7, capacity=2)
    feed.publish([AllBlocksCleared()])
    batches = feed.follow(1)
    assert await take(batches, 1) == [1]
    for _ in range(4):
        feed.publish([AllBlocksCleared()])
    with pytest.raises(Aborted, match="batches 2 to 3 were dropped; the oldest kept batch is 4"):
        await anext(batches)


async def test_a_reader_of_prefixes_gets_several_steps_at_once_and_sees_which() -> None:
    feed = KVEventFeed(7)
    feed.publish([AllBlocksCleared()])
    responses = feed.follow_prefixes(None, 0.0, b"specimen")
    first = await anext(responses)
    assert (first.sequence, first.engine_epoch, first.prefix_changes.first_sequence) == (1, 7, 2)
    assert first.prefix_changes.specimen_hash == b"specimen"
    feed.publish([BlockRemoved([b"12345678 and more"], "GPU")])
    feed.publish([BlockRemoved([b"abcdefgh and more"], "GPU")])
    async with asyncio.timeout(30):
        second = await anext(responses)
    assert (second.sequence, second.prefix_changes.first_sequence) == (3, 2)
    assert [block.to_bytes(8, "little") for block in second.prefix_changes.removed] == [b"12345678", b"abcdefgh"]
    assert not second.events


async def test_a_long_replay_is_read_in_parts() -> None:
    feed = KVEventFeed(7)
    for _ in range(MERGED_BATCHES + 1):
        feed.publish([AllBlocksCleared()])
    assert await take(feed.follow_prefixes(1, 0.0, b""), 3) == [0, MERGED_BATCHES, MERGED_BATCHES + 1]

"""Tests how events of the prefix cache become changes for placement."""

from tokenloom.engine_core.data.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventLog,
    StateRemoved,
    StateStored,
)
from tokenloom.request.prefix_schedule import scheduled
from tokenloom.services.engine.records.kv_event_feed import KVEventFeed, merged
from tokenloom.v1.engine_pb2 import PrefixChain, PrefixChanges


def hashes(count: int, prompt: int = 1) -> list[bytes]:
    return [bytes([prompt, 0, *divmod(index, 256), 0, 0, 0, 0]) + b"the rest" for index in range(count)]


def named(blocks: list[bytes]) -> list[int]:
    return [int.from_bytes(block[:8], "little") for block in blocks]


def changes(*steps: list[KVCacheEvent]) -> PrefixChanges:
    feed = KVEventFeed(7)
    for events in steps:
        feed.publish(events)
    return merged(feed._batches)


def stored(blocks: list[bytes], first: int, end: int) -> list[KVCacheEvent]:
    log = KVEventLog(1)
    for index in range(first, end):
        log.stored(blocks, index, [0])
    return log.take()


def test_a_prompt_of_several_steps_is_one_chain_of_named_blocks() -> None:
    blocks = hashes(400)
    (chain,) = changes(stored(blocks, 0, 130), stored(blocks, 130, 131), stored(blocks, 131, 400)).stored
    assert not chain.HasField("parent")
    assert list(chain.blocks) == named(scheduled(blocks))


def test_a_chain_in_the_middle_has_a_parent() -> None:
    blocks = hashes(400)
    (chain,) = changes(stored(blocks, 150, 160)).stored
    assert chain == PrefixChain(parent=named(blocks)[149], blocks=named([blocks[151], *blocks[153:160:2]]))


def test_blocks_that_no_prompt_names_are_left_out() -> None:
    assert not changes(stored(hashes(400), 200, 201)).stored


def test_what_happened_last_to_a_block_counts() -> None:
    one, two, three = hashes(3)
    gone: list[KVCacheEvent] = [BlockRemoved([two, three], "GPU")]
    again: list[KVCacheEvent] = [BlockStored([two], one, bytearray(4), 1, "GPU", 1, one)]
    assert changes(stored([one, two, three], 0, 3), gone, again) == PrefixChanges(
        removed=named([three]), stored=[PrefixChain(blocks=named([one, two]))]
    )


def test_a_reset_replaces_what_was_before() -> None:
    old, new = hashes(2), hashes(1, prompt=2)
    assert changes(
        stored(old, 0, 2), [BlockRemoved(old[1:], "GPU")], [AllBlocksCleared()], stored(new, 0, 1)
    ) == PrefixChanges(all_cleared=True, stored=[PrefixChain(blocks=named(new))])


def test_what_happened_last_to_a_state_counts() -> None:
    one, two, three = hashes(3)
    steps: list[list[KVCacheEvent]] = [[StateStored(one), StateStored(two)], [StateRemoved(one), StateRemoved(three)]]
    assert changes(*steps) == PrefixChanges(states_removed=named([one, three]), states_stored=named([two]))
    assert changes(*steps, [AllBlocksCleared()], [StateStored(one)]) == PrefixChanges(
        all_cleared=True, states_stored=named([one])
    )

import struct

from tests.engine_core.helpers import finish, make_core, make_request
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    KVEventLog,
    StateEvents,
    StateRemoved,
    StateStored,
    listed_ids,
)
from tokenloom.request.prefix_schedule import block_hashes


def packed(ids: list[int]) -> bytearray:
    return bytearray(struct.pack(f"<{len(ids)}I", *ids))


def telling_core(num_blocks: int = 8) -> EngineCore:
    return make_core(num_blocks=num_blocks, block_size=4, kv_events=True)


def events_of(core: EngineCore) -> list[KVCacheEvent]:
    events: list[KVCacheEvent] = []
    while core.has_work():
        events += core.step().kv_events
    return events


def test_events_of_stored_blocks_have_tokens_and_parent() -> None:
    core = telling_core()
    prompt = list(range(10))
    core.add_request(make_request("a", prompt, 3))
    first, second = block_hashes([*prompt, 0, 0], 4)[:2]
    assert events_of(core)[0] == BlockStored([first, second], None, packed(prompt[:8]), 4, "GPU")
    core.add_request(make_request("b", [*prompt[:8], 50, 51, 52, 53, 54], 1))
    (stored,) = events_of(core)
    assert isinstance(stored, BlockStored)
    assert (stored.parent_block_hash, listed_ids(stored.token_ids)) == (second, [50, 51, 52, 53])


def test_blocks_of_tenants_have_hashes_of_their_own() -> None:
    core = telling_core()
    prompt = list(range(10))
    for name, salt in (("a", b"one"), ("b", b"two"), ("c", b"one")):
        core.add_request(make_request(name, prompt, 1, salt=salt))
        events = events_of(core)
        assert events == (
            [BlockStored(block_hashes(prompt, 4, salt=salt), None, packed(prompt[:8]), 4, "GPU")] if name != "c" else []
        )


def test_removed_blocks_are_events() -> None:
    core = telling_core(num_blocks=4)
    core.add_request(make_request("a", [1] * 9, 1))
    first, second = block_hashes([1] * 8, 4)
    events_of(core)
    core.add_request(make_request("b", [2] * 13, 1))
    events = events_of(core)
    assert BlockRemoved([second, first], "GPU") in events


def test_a_reset_is_an_event_without_a_request() -> None:
    core = telling_core()
    core.add_request(make_request("a", [1] * 9, 1))
    events_of(core)
    assert core.reset_prefix_cache()
    assert events_of(core) == [AllBlocksCleared()]
    assert not core.has_work()


def test_a_reset_drops_earlier_events() -> None:
    log = KVEventLog(2)
    log.stored([b"a"], 0, [1, 2])
    log.forgot_all()
    log.stored([b"b"], 0, [3, 4])
    log.evicted(0, b"b")
    stored = BlockStored([b"b"], None, packed([3, 4]), 2, "GPU")
    assert log.take() == [AllBlocksCleared(), stored, BlockRemoved([b"b"], "GPU")]
    assert not log.take()


def test_forgotten_content_is_removed() -> None:
    log = KVEventLog(2)
    log.forgot(b"a")
    log.evicted(0, b"b")
    assert log.take() == [BlockRemoved([b"a", b"b"], "GPU")]


def test_there_are_no_events_by_default() -> None:
    core = make_core()
    core.add_request(make_request("a", [1] * 9))
    assert core.scheduler.kv_events is None
    assert not events_of(core)
    assert not finish(core)


def test_an_event_says_where_in_a_prompt_it_begins_and_which_named_block_is_before() -> None:
    log = KVEventLog(1)
    hashes = [bytes([index]) for index in range(200)]
    log.stored(hashes, 128, [1])
    log.stored(hashes, 129, [2])
    log.stored(hashes, 133, [3])
    near, far = log.take()
    assert isinstance(near, BlockStored)
    assert isinstance(far, BlockStored)
    assert (near.num_blocks_before, near.named_block_before) == (128, hashes[127])
    assert (near.block_hashes, listed_ids(near.token_ids)) == (hashes[128:130], [1, 2])
    assert (far.num_blocks_before, far.named_block_before) == (133, hashes[131])  # of 133 blocks the 132nd is the last


def test_states_with_one_named_block_are_reported_together() -> None:
    """Of blocks 128 to 160 every second one is named, so two states may have one named block."""
    hashes = [bytes([index]) * 32 for index in range(140)]
    log = KVEventLog(16)
    states = StateEvents(log)
    states.stored(hashes, 130)
    states.stored(hashes, 131)
    states.evicted(0, hashes[129])
    assert log.take() == [StateStored(hashes[129])]
    states.forgot(hashes[130])
    states.forgot(hashes[130])
    assert log.take() == [StateRemoved(hashes[129])]

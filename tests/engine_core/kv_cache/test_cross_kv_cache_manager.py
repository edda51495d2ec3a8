"""Blocks for the rows beside prompts: who writes them, who shares them, and when they are free again."""

from tokenloom.engine_core.data.config import CacheConfig
from tokenloom.engine_core.data.embedding_rows import MediaSpan
from tokenloom.engine_core.data.kv_events import BlockRemoved, KVEventLog
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.request import RequestKV
from tokenloom.engine_core.kv_cache.kv_cache_manager import CrossKVCacheManager

SIZE, CROSS = 4, 3


def make(num_blocks: int = 12, *, caching: bool = True, events: KVEventLog | None = None) -> CrossKVCacheManager:
    kv_cache = KVCacheConfig(num_blocks, 400, cross_blocks=CROSS)
    return CrossKVCacheManager(kv_cache, CacheConfig(block_size=SIZE, enable_prefix_caching=caching), events)


def request_of(sound: str, token_ids: list[int], salt: bytes = b"") -> RequestKV:
    return RequestKV(sound, token_ids, salt, media=[MediaSpan(0, 0, 0, sound.encode(), 10)])


def begin(manager: CrossKVCacheManager, request: RequestKV) -> RequestKV:
    hits = manager.find_cached_blocks(request)
    assert manager.can_admit(request, hits, request.num_tokens, 0)
    manager.admit(request, hits)
    assert manager.allocate(request, request.num_tokens - request.num_computed_tokens) is not None
    request.num_computed_tokens = request.num_tokens
    return request


def test_the_first_request_of_a_sound_writes_and_others_share() -> None:
    manager = make()
    first = begin(manager, request_of("a", [1, 2, 3]))
    assert first.lacks_cross
    second = begin(manager, request_of("a", [1, 2, 4]))
    other = begin(manager, request_of("b", [1, 2, 3]))
    assert not second.lacks_cross
    assert second.cross_block_ids == first.cross_block_ids
    assert other.lacks_cross
    assert not set(other.cross_block_ids) & set(first.cross_block_ids)
    assert manager.pool.num_free == 12 - 2 * CROSS - 3
    for request in (first, second, other):
        manager.free(request)
        assert (request.cross_block_ids, request.lacks_cross) == ([], False)
    assert manager.pool.num_free == 12


def test_what_is_free_is_found_until_it_is_needed() -> None:
    manager = make(num_blocks=8)
    first = begin(manager, request_of("a", [1, 2, 3]))
    manager.free(first)
    again = begin(manager, request_of("a", [1, 2, 3]))
    assert not again.lacks_cross
    manager.free(again)
    begin(manager, request_of("b", list(range(9))))  # takes all blank blocks, and one of the sound
    assert manager.lacks_cross(request_of("a", [1]))


def test_tokens_and_rows_of_another_sound_or_salt_are_not_hit() -> None:
    manager = make(num_blocks=30)
    begin(manager, request_of("a", list(range(9))))
    assert len(manager.find_cached_blocks(request_of("a", list(range(9))))) == 2
    for request in (request_of("b", list(range(9))), request_of("a", list(range(9)), b"salt")):
        assert not manager.find_cached_blocks(request)
        assert manager.lacks_cross(request)


def test_room_for_the_rows_counts_at_admission() -> None:
    manager = make(num_blocks=7)
    assert manager.num_slots == 4 * SIZE
    begin(manager, request_of("a", [1, 2, 3]))
    assert not manager.can_admit(request_of("b", [1]), [], 1, 0)
    assert manager.can_admit(request_of("a", [1]), [], 1, 0), "it shares the blocks of the sound"
    assert not manager.can_admit(request_of("a", [1]), [], 1, 3)


def test_without_a_prefix_cache_each_request_writes_its_own() -> None:
    manager = make(caching=False)
    first, second = (begin(manager, request_of("a", [1, 2, 3])) for _ in range(2))
    assert first.lacks_cross
    assert second.lacks_cross
    assert not set(first.cross_block_ids) & set(second.cross_block_ids)


def test_wrong_rows_are_forgotten() -> None:
    manager = make()
    request = begin(manager, request_of("a", [1, 2, 3]))
    manager.forget(request)
    assert manager.lacks_cross(request_of("a", [1]))
    manager.free(request)
    assert manager.pool.num_free == 12


def test_wrong_rows_of_a_preempted_request_are_forgotten() -> None:
    """With overlapping steps a request may lose its blocks before its logits prove to be NaN."""
    manager = make()
    request = begin(manager, request_of("a", [1, 2, 3]))
    sharer = begin(manager, request_of("a", [1, 2, 4]))
    manager.free(request)
    manager.forget(request)
    assert manager.lacks_cross(request_of("a", [1]))
    manager.free(sharer)
    assert manager.lacks_cross(request_of("a", [1]))
    assert manager.pool.num_free == 12


def test_events_name_blocks_of_tokens_only() -> None:
    events = KVEventLog(SIZE)
    manager = make(num_blocks=8, events=events)
    request = begin(manager, request_of("a", list(range(5))))
    manager.free(request)
    begin(manager, request_of("b", list(range(20))))
    removed = [event for event in events.take() if isinstance(event, BlockRemoved)]
    assert [each for event in removed for each in event.block_hashes] == request.block_hashes

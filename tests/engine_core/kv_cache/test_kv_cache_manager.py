import pytest

from tests.engine_core.invariants import check_pool
from tokenloom.engine_core.data.config import CacheConfig
from tokenloom.engine_core.data.kv_events import BlockRemoved, BlockStored, KVEventLog
from tokenloom.engine_core.data.request import RequestKV
from tokenloom.engine_core.kv_cache import block_pool
from tokenloom.engine_core.kv_cache.kv_cache_manager import KVCacheManager
from tokenloom.request.prefix_schedule import hash_block


def make_request_of(prompt: list[int], salt: bytes = b"", request_id: str = "r") -> RequestKV:
    return RequestKV(request_id, prompt, salt)


def make_kv(num_blocks: int, *, caching: bool = True, events: KVEventLog | None = None) -> KVCacheManager:
    return KVCacheManager(num_blocks, CacheConfig(block_size=4, enable_prefix_caching=caching), events)


def compute(kv: KVCacheManager, request: RequestKV, num_tokens: int) -> None:
    assert kv.allocate(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens


def test_blocks_come_as_tokens_need_them() -> None:
    kv = make_kv(8)
    request = make_request_of([1] * 20)
    assert len(kv.allocate(request, 5) or []) == 2
    request.num_computed_tokens = 5
    assert kv.allocate(request, 3) == []
    request.num_computed_tokens = 8
    added = kv.allocate(request, 1)
    assert added == request.block_ids[2:]
    check_pool(kv.pool, [request])


def test_too_few_blocks_change_nothing() -> None:
    kv = make_kv(2)
    request = make_request_of([1] * 20)
    assert kv.allocate(request, 9) is None
    assert request.block_ids == []
    assert kv.pool.num_free == 2


def test_a_scheduled_block_can_be_hit_before_it_is_computed() -> None:
    kv = make_kv(8)
    first, second = make_request_of([1] * 10), make_request_of([1] * 10)
    assert kv.find_cached_blocks(second) == []
    kv.allocate(first, 10)
    assert kv.find_cached_blocks(second) == first.block_ids[:2]


def test_a_full_hit_leaves_the_last_block_to_compute() -> None:
    kv = make_kv(8)
    first, same, longer = make_request_of([1] * 8), make_request_of([1] * 8), make_request_of([1] * 9)
    compute(kv, first, 8)
    assert kv.find_cached_blocks(same) == first.block_ids[:1]
    assert kv.find_cached_blocks(longer) == first.block_ids


def test_a_request_that_skips_the_cache_finds_nothing_and_is_found() -> None:
    kv = make_kv(8)
    first, second = make_request_of([1] * 10), make_request_of([1] * 10)
    first.skip_reading_prefix_cache = second.skip_reading_prefix_cache = True
    compute(kv, first, 10)
    assert kv.find_cached_blocks(second) == []
    second.skip_reading_prefix_cache = False
    assert kv.find_cached_blocks(second) == first.block_ids[:2]


def test_admission_shares_and_counts_what_is_computed() -> None:
    kv = make_kv(8)
    first, second = make_request_of([1] * 10), make_request_of([1] * 8 + [2, 2])
    compute(kv, first, 10)
    kv.admit(second, kv.find_cached_blocks(second))
    assert second.num_computed_tokens == 8
    compute(kv, second, 2)
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    check_pool(kv.pool, [first, second])


def test_a_free_hit_needs_room_too() -> None:
    kv = make_kv(4)
    first = make_request_of([1] * 8)
    compute(kv, first, 8)
    kv.free(first)
    other = make_request_of([2] * 8, request_id="other")
    compute(kv, other, 8)
    # Two blocks are free, and both are hit: the third is missing.
    request = make_request_of([1] * 12)
    hits = kv.find_cached_blocks(request)
    assert len(hits) == 2
    assert not kv.can_admit(request, hits, request.num_tokens, num_spare=0)
    kv.free(other)
    assert kv.can_admit(request, hits, request.num_tokens, num_spare=1)
    assert not kv.can_admit(request, hits, request.num_tokens, num_spare=2)


def test_freed_blocks_are_hit_until_they_are_needed() -> None:
    kv = make_kv(3)
    first = make_request_of([1] * 12)
    compute(kv, first, 12)
    blocks = first.block_ids
    kv.free(first)
    assert first.block_ids == []
    again = make_request_of([1] * 12)
    assert kv.find_cached_blocks(again) == blocks[:2]
    compute(kv, make_request_of([2] * 5), 5)
    assert kv.find_cached_blocks(again) == blocks[:1]


def test_an_equal_block_is_found_when_the_first_one_has_gone() -> None:
    events = KVEventLog(4)
    kv = make_kv(3, events=events)
    first, second = make_request_of([1] * 4 + [2]), make_request_of([1] * 4 + [3] * 5, request_id="s")
    compute(kv, first, 4)
    compute(kv, second, 4)
    events.take()
    kv.free(first)
    compute(kv, second, 5)
    removed, stored = events.take()
    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == (second.block_hashes, None)
    assert kv.find_cached_blocks(make_request_of([1] * 4 + [3] * 5)) == second.block_ids[:2]


@pytest.mark.parametrize(("mine", "theirs", "hits"), [(b"a", b"a", 2), (b"a", b"b", 0), (b"a", b"", 0)])
def test_salts_never_share(mine: bytes, theirs: bytes, hits: int) -> None:
    kv = make_kv(8)
    compute(kv, make_request_of([1] * 10, mine), 10)
    assert len(kv.find_cached_blocks(make_request_of([1] * 10, theirs))) == hits


def test_without_prefix_caching_nothing_is_found() -> None:
    kv = make_kv(8, caching=False)
    compute(kv, make_request_of([1] * 10), 10)
    request = make_request_of([1] * 10)
    assert kv.find_cached_blocks(request) == []
    assert request.block_hashes == []


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def count(parent: bytes, token_ids: list[int], salt: bytes) -> bytes:
        hashed.append(tuple(token_ids))
        return hash_block(parent, token_ids, salt)

    monkeypatch.setattr(block_pool, "hash_block", count)
    kv = make_kv(30)
    request = make_request_of(list(range(20)))
    for _ in range(3):
        kv.find_cached_blocks(request)
        compute(kv, request, 20)
        for token_id in range(20, 23):
            request.all_token_ids.append(token_id)
            compute(kv, request, 1)
        kv.free(request)
        del request.all_token_ids[20:]
    assert hashed == [tuple(range(start, start + 4)) for start in range(0, 20, 4)]


def test_forgotten_blocks_do_not_come_back_with_the_next_block_of_a_request_that_shares_them() -> None:
    kv = make_kv(12)
    wrong, sharer = make_request_of([1] * 10), make_request_of([1] * 8 + [2] * 12)
    compute(kv, wrong, 10)
    kv.admit(sharer, kv.find_cached_blocks(sharer))
    assert sharer.block_ids == wrong.block_ids[:2]
    kv.forget(wrong)
    kv.free(wrong)
    compute(kv, sharer, 4)
    compute(kv, sharer, 4)
    same = make_request_of([1] * 8 + [2] * 12)
    assert kv.find_cached_blocks(same) == [], "what follows wrong blocks was computed from them"
    kv.free(sharer)
    check_pool(kv.pool, [])
    compute(kv, same, 16)
    assert kv.find_cached_blocks(make_request_of([1] * 8 + [2] * 12)) == same.block_ids[:4], "their memory is used anew"

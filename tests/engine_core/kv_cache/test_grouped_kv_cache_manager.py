"""Layers with a window keep the blocks of that window only; hits are found where every group has what it needs."""

from collections.abc import Sequence

import pytest

from tests.engine_core.invariants import check_pool
from tests.engine_core.kv_cache.grouped_hash_worker import groups_of
from tokenloom.engine_core.data.config import CacheConfig
from tokenloom.engine_core.data.kv_events import BlockRemoved, BlockStored, KVEventLog, listed_ids
from tokenloom.engine_core.data.kv_groups import NULL_BLOCK, partition_layers
from tokenloom.engine_core.data.request import RemoteKVState, RequestKV
from tokenloom.engine_core.kv_cache.grouped_kv_cache_manager import GroupedKVCacheManager
from tokenloom.engine_core.kv_cache.prefix_search import group_key
from tokenloom.request.prefix_schedule import block_hashes

BLOCK = 4


def make_kv(
    num_blocks: int = 60,
    windows: Sequence[int | None] = (None, 8),
    *,
    events: KVEventLog | None = None,
    lends: bool = False,
    max_chunk: int = 8,
) -> GroupedKVCacheManager:
    config = CacheConfig(block_size=BLOCK)
    return GroupedKVCacheManager(num_blocks, groups_of(windows), config, max_chunk, events, lends=lends)


def make_request_of(prompt: list[int], request_id: str = "r") -> RequestKV:
    return RequestKV(request_id, prompt)


def compute(kv: GroupedKVCacheManager, request: RequestKV, chunks: Sequence[int]) -> None:
    for num_tokens in chunks:
        assert kv.allocate(request, num_tokens) is not None
        request.num_computed_tokens += num_tokens


def kept(kv: GroupedKVCacheManager, request: RequestKV, group: int) -> list[int]:
    """The blocks of tokens that a group keeps of a request."""
    table = request.block_ids[group :: kv.num_groups]
    return [index for index, block_id in enumerate(table) if block_id != NULL_BLOCK]


def test_a_window_releases_what_it_left() -> None:
    kv = make_kv()
    request = make_request_of(list(range(40)))
    compute(kv, request, [8, 8, 8, 8])
    # The last chunk began at 24, whose window begins at 17, in block 4.
    assert kept(kv, request, 0) == list(range(8))
    assert kept(kv, request, 1) == [4, 5, 6, 7]
    compute(kv, request, [1])
    assert kept(kv, request, 1) == [6, 7, 8]
    check_pool(kv.pool, [request])


def test_a_token_within_a_block_changes_nothing() -> None:
    kv = make_kv()
    request = make_request_of(list(range(40)))
    compute(kv, request, [8, 8, 8, 1])
    table, num_free = request.block_ids.copy(), kv.pool.num_free
    assert [kv.allocate(request, 1) for request.num_computed_tokens in (25, 26)] == [[], []]
    assert (request.block_ids, kv.pool.num_free) == (table, num_free)


def test_too_few_blocks_add_none() -> None:
    kv = make_kv(6)
    request = make_request_of(list(range(40)))
    assert kv.allocate(request, 12) is None
    assert (request.block_ids, kv.pool.num_free) == ([], 5)


def test_a_hit_needs_all_blocks_of_full_attention_and_the_last_of_the_window() -> None:
    kv = make_kv()
    first, same = make_request_of(list(range(33))), make_request_of(list(range(33)))
    compute(kv, first, [8, 8, 8, 8])
    hits = kv.find_cached_blocks(same)
    assert kv.num_hit_tokens(hits) == 32
    kv.admit(same, hits)
    assert same.block_ids[0::2] == first.block_ids[0::2]
    assert kept(kv, same, 1) == [6, 7]
    assert same.block_ids[1::2][6:] == first.block_ids[1::2][6:]
    check_pool(kv.pool, [first, same])


def test_blocks_that_a_window_left_are_evicted_first() -> None:
    kv = make_kv(22)
    first = make_request_of(list(range(41)))
    compute(kv, first, [8] * 5)
    kv.free(first)
    compute(kv, make_request_of([999] * 12, "other"), [8, 4])
    assert kv.num_hit_tokens(kv.find_cached_blocks(make_request_of(list(range(41))))) == 40
    assert kv.find_cached_blocks(make_request_of(list(range(18)))) == []


def test_two_windows_agree_on_a_prefix() -> None:
    kv = make_kv(windows=(None, 8, 16))
    first = make_request_of(list(range(41)))
    compute(kv, first, [8] * 5)
    kv.pool.forget([first.block_ids[3 * 8 + 1]])  # the smaller window loses block 8
    # Up to block 8 the smaller window has all; the larger one has it, too.
    assert kv.num_hit_tokens(kv.find_cached_blocks(make_request_of(list(range(41))))) == 32
    kv.pool.forget([first.block_ids[3 * 5 + 2]])  # the larger one loses block 5, and hits must end before it
    assert kv.num_hit_tokens(kv.find_cached_blocks(make_request_of(list(range(41))))) == 20


def test_a_blocked_request_notices_a_longer_hit() -> None:
    kv = make_kv()
    waiting = make_request_of(list(range(33)))
    assert not kv.finds_more(waiting, 0)
    first = make_request_of(list(range(33)))
    compute(kv, first, [8])
    assert kv.finds_more(waiting, 0)
    hits = kv.find_cached_blocks(waiting)
    assert not kv.finds_more(waiting, len(hits))
    compute(kv, first, [8])
    assert kv.finds_more(waiting, len(hits))


@pytest.mark.parametrize("num_hit_chunks", [0, 1, 4])
def test_what_is_admitted_fits_to_its_end(num_hit_chunks: int) -> None:
    """A pool of exactly the need of the longest request is enough for it, whatever it hits."""
    probe = make_kv()
    kv = make_kv(probe._need.of_blocks(16) + 1)
    assert kv.num_slots == 16 * BLOCK
    earlier = make_request_of(list(range(64)))
    compute(kv, earlier, [8] * num_hit_chunks)
    kv.free(earlier)
    request = make_request_of(list(range(64)))
    hits = kv.find_cached_blocks(request)
    assert kv.can_admit(request, hits, 64, 0)
    kv.admit(request, hits)
    while request.num_computed_tokens < 64:
        compute(kv, request, [min(8, 64 - request.num_computed_tokens)])
    check_pool(kv.pool, [request])
    assert not kv.can_admit(make_request_of([1] * 64), [], 64, 0)


def test_a_reader_gets_the_last_window() -> None:
    kv = make_kv(lends=True)
    request = make_request_of(list(range(38)))
    request.remote = RemoteKVState(b"lease")
    kv.admit(request, [])
    lent = kv.reserve(request)
    # The token at 37 sees the positions from 30 on, which begin in block 7.
    assert [block_id != NULL_BLOCK for block_id in lent[1::2]] == [False] * 7 + [True] * 3
    assert NULL_BLOCK not in lent[0::2]
    check_pool(kv.pool, [request])
    compute(kv, request, [8, 8, 8, 8, 6])
    assert lent[0::2] == request.block_ids[0::2]
    assert lent[1::2][7:] == request.block_ids[1::2][7:]
    check_pool(kv.pool, [request])
    kv.free(request)
    check_pool(kv.pool, [])


def test_a_lease_that_ends_early_returns_its_blocks() -> None:
    kv = make_kv(lends=True)
    request = make_request_of(list(range(38)))
    kv.admit(request, [])
    kv.reserve(request)
    compute(kv, request, [8])
    kv.free(request)
    check_pool(kv.pool, [])
    assert kv.pool.num_free == kv.pool.num_blocks


def test_a_load_fills_the_last_window_only() -> None:
    kv = make_kv()
    request = make_request_of(list(range(38)))
    kv.admit(request, [])
    kv.reserve_load(request, 38)
    assert (kept(kv, request, 0), kept(kv, request, 1)) == (list(range(10)), [7, 8, 9])
    kv.finish_load(request, 37)
    compute(kv, request, [1])
    check_pool(kv.pool, [request])
    assert kv.num_hit_tokens(kv.find_cached_blocks(make_request_of(list(range(38))))) == 36


def test_a_load_after_a_hit_gives_up_the_windows_of_the_hit() -> None:
    kv = make_kv()
    first, request = make_request_of(list(range(17))), make_request_of(list(range(38)))
    compute(kv, first, [8, 8])
    kv.admit(request, kv.find_cached_blocks(request))
    assert kept(kv, request, 1) == [2, 3]
    kv.reserve_load(request, 22)
    assert kept(kv, request, 1) == [7, 8, 9]
    check_pool(kv.pool, [first, request])


@pytest.mark.parametrize("num_free", [15, 16])
def test_a_load_needs_room_for_all_its_blocks_at_once(num_free: int) -> None:
    """Another request holds the window of the hit too, so giving it up frees no block."""
    kv = make_kv(1 + 16 + num_free, windows=(None, 40))
    first, request = make_request_of(list(range(33))), make_request_of(list(range(65)))
    compute(kv, first, [8] * 4)
    hits = kv.find_cached_blocks(request)
    assert (kv.num_hit_tokens(hits), kv.pool.num_free) == (32, num_free)
    assert kv.can_admit(request, hits, 65, 0), "computing it in chunks needs fewer blocks of the window"
    fits = kv.can_admit(request, hits, 65, 0, 32)
    assert fits == (num_free == 16)
    if fits:
        kv.admit(request, hits)
        kv.reserve_load(request, 32)
        assert kv.pool.num_free == 0
        check_pool(kv.pool, [first, request])


def test_a_load_from_a_tier_shares_what_the_pool_has() -> None:
    kv = make_kv()
    first, request = make_request_of(list(range(33))), make_request_of(list(range(33)))
    compute(kv, first, [8] * 4)
    kv.pool.forget([first.block_ids[0]])  # block 0 of full attention
    assert kv.find_cached_blocks(request) == []
    request.remote = RemoteKVState()
    kv.admit(request, [])
    kv.reserve_load(request, 32)
    same = [
        index for index, pair in enumerate(zip(first.block_ids, request.block_ids, strict=True)) if len({*pair}) == 1
    ]
    assert [index for index in same if first.block_ids[index] != NULL_BLOCK] == [2, 4, 6, 8, 10, 12, 13, 14, 15]
    check_pool(kv.pool, [first, request])
    kv.free(request)
    check_pool(kv.pool, [first])


def test_wrong_content_is_forgotten_where_windows_left_it() -> None:
    kv = make_kv(40)
    request = make_request_of(list(range(40)))
    compute(kv, request, [8] * 4)
    left = [group_key(block_hash, group) for block_hash in block_hashes(list(range(32)), BLOCK) for group in (0, 1)]
    assert len([key for key in left if kv.pool.find(key) is not None]) > len(
        [each for each in request.block_ids if each]
    )
    kv.forget(request)
    assert [key for key in left if kv.pool.find(key) is not None] == []
    check_pool(kv.pool, [request])
    kv.free(request)
    check_pool(kv.pool, [])


def test_wrong_content_does_not_come_back_with_the_next_block_of_a_request_that_shares_it() -> None:
    kv = make_kv(60)
    wrong, sharer = make_request_of(list(range(20))), make_request_of([*range(16), *range(50, 70)])
    compute(kv, wrong, [8, 8, 4])
    kv.admit(sharer, kv.find_cached_blocks(sharer))
    assert sharer.num_computed_tokens == 16
    kv.forget(wrong)
    kv.free(wrong)
    compute(kv, sharer, [8, 8])
    assert kv.find_cached_blocks(make_request_of([*range(16), *range(50, 70)])) == []
    kv.free(sharer)
    check_pool(kv.pool, [])


def test_events_follow_full_attention() -> None:
    events = KVEventLog(BLOCK)
    kv = make_kv(12, events=events)
    request = make_request_of(list(range(20)))
    compute(kv, request, [8, 8])
    hashes = block_hashes(list(range(16)), BLOCK)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, listed_ids(stored.token_ids)) == (hashes, list(range(16)))
    kv.free(request)
    compute(kv, make_request_of([999] * 20, "other"), [8, 8])
    removed = [event for event in events.take() if isinstance(event, BlockRemoved)]
    assert {block_hash for event in removed for block_hash in event.block_hashes} <= set(hashes)
    kv.pool.forget_all()
    assert len(events.take()) == 1


def test_five_windows_to_one_full_layer_need_a_third() -> None:
    """A context of 8,192 tokens: blocks times bytes, while a prompt is computed and at its end."""
    windows = [None if layer % 6 == 5 else 1024 for layer in range(12)]
    groups = partition_layers(windows, max_model_len=8192)
    layers = max(len(group.layers) for group in groups)
    config = CacheConfig(block_size=16)
    kv = GroupedKVCacheManager(8000, groups, config, max_chunk=512)
    request = make_request_of(list(range(8192)))
    one_table = 8192 // 16 * len(windows)  # layer blocks
    held = []
    while request.num_computed_tokens < 8191:
        compute(kv, request, [min(512, 8191 - request.num_computed_tokens)])
        held.append((kv.pool.num_blocks - kv.pool.num_free) * layers)
    compute(kv, request, [1])
    held.append((kv.pool.num_blocks - kv.pool.num_free) * layers)
    assert held[-1] / one_table <= 0.30
    assert max(held) / one_table <= 0.35

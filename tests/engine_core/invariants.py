"""Checks what must hold between any two steps."""

from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest

from tokenloom.engine_core.data.kv_groups import NULL_BLOCK
from tokenloom.engine_core.data.request import RequestKV, RequestStatus
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.kv_cache.block_pool import BlockPool
from tokenloom.engine_core.kv_cache.prefix_search import group_key
from tokenloom.engine_core.kv_cache.state_slots import StateSlotPool
from tokenloom.engine_core.scheduling.live_requests import priority_key
from tokenloom.engine_core.scheduling.media_rows import RowStore
from tokenloom.engine_core.scheduling.scheduler import Scheduler
from tokenloom.request.prefix_schedule import block_hashes


def check_scheduler(scheduler: Scheduler) -> None:
    """Check that every request is in one place, and holds exactly the blocks that its computed tokens need."""
    waiting = list(scheduler.waiting)
    remote = scheduler._remote
    loading = list(remote._loading.values()) if remote is not None else []
    away = list(remote._waiting.values()) if remote is not None else []
    assert len(scheduler.running) <= scheduler.config.max_num_seqs
    parked = list(scheduler.media.parked.values()) if scheduler.media is not None else []
    assert sorted(r.request_id for r in waiting + scheduler.running + away + parked) == sorted(scheduler.requests)
    assert scheduler.waiting.num_tokens == sum(request.num_tokens for request in waiting)
    assert len(scheduler.waiting) == len(waiting)
    assert set(scheduler.waiting.tenants) == {request.tenant for request in waiting}
    assert scheduler._live._num_of_tenant == Counter(request.tenant for request in scheduler.requests.values())
    assert all(request.status is RequestStatus.RUNNING for request in scheduler.running)
    assert all(request.status is RequestStatus.WAITING_FOR_REMOTE_KVS for request in away)
    assert all(request.is_finished or request in away for request in loading)
    assert all(request.status is RequestStatus.WAITING_FOR_ROWS and not request.kv.block_ids for request in parked)
    for request in waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        if not (request.kv.remote and request.kv.remote.wait_ns):
            assert not request.kv.block_ids
            assert request.kv.num_computed_tokens == 0
    if scheduler._in_flight is None:
        assert all(not request.num_output_placeholders for request in scheduler.requests.values())
    for request in scheduler.running:
        assert request.num_tokens == len(request.all_token_ids)
        assert request.kv.num_computed_tokens < request.num_tokens + request.num_output_placeholders
        assert request.num_tokens + request.num_output_placeholders <= request.max_num_tokens
        num_blocks = -(-request.kv.num_computed_tokens // scheduler.kv.block_size)
        num_blocks *= scheduler.kv.pool.num_groups
        has_spare = request.kv.remote is not None or scheduler.drafts is not None  # a rejected draft leaves its block
        assert len(request.kv.block_ids) == num_blocks or (has_spare and len(request.kv.block_ids) > num_blocks)
        most_blocks = -(-max(request.max_num_tokens - 1, request.num_tokens) // scheduler.kv.block_size)
        assert len(request.kv.block_ids) <= most_blocks * scheduler.kv.pool.num_groups
    _check_order(scheduler)
    holders = waiting + scheduler.running + away + [request for request in loading if request.is_finished]
    check_pool(
        scheduler.kv.pool,
        [request.kv for request in holders],
        [kv.block_ids + kv.reserved_block_ids for kv in remote._held.values()] if remote is not None else (),
    )
    _check_content(scheduler)
    if scheduler.media is not None:
        _check_rows(scheduler.media, scheduler)
    if scheduler.kv.states is not None:
        _check_states(scheduler.kv.states, scheduler)


def _check_rows(media: RowStore, scheduler: Scheduler) -> None:
    """Check that rows are held by live requests that need them, without a gap, and within their room."""
    assert media.num_bytes == sum(entry.num_bytes for entry in media._entries.values()) <= media.capacity
    assert media._parked_tokens == sum(request.num_tokens for request in media.parked.values())
    assert media._holdings.keys() <= scheduler.requests.keys()
    assert media.parked.keys() <= media._holdings.keys()
    holders = Counter((request_id, key) for key, entry in media._entries.items() for request_id in entry.holders)
    held = Counter((request_id, key) for request_id, holding in media._holdings.items() for key in holding.keys)
    assert holders == held
    assert all(entry.holders for entry in media._entries.values())
    for request_id, holding in media._holdings.items():
        request = scheduler.requests[request_id]
        start = request.kv.num_computed_tokens if request.status is RequestStatus.RUNNING else holding.start
        lacks = request.kv.lacks_cross
        spans = [span for span in request.kv.media if span.end > start or (span.is_beside and lacks)]
        needed = list(dict.fromkeys(span.rows_key for span in spans))
        if request.status is RequestStatus.RUNNING:  # an image that stands twice moves back
            assert set(holding.keys) <= set(needed)
        else:
            assert holding.keys == needed[: len(holding.keys)]
        assert holding.is_short == (len(holding.keys) < len(needed))


def _check_states(states: StateSlotPool, scheduler: Scheduler) -> None:
    """Check that each request that runs owns a slot, no other slot is held, and a state is found only with its KV."""
    remote = scheduler._remote
    requests = {request.request_id: request.kv.state for request in scheduler.requests.values() if request.kv.state}
    others = {request.request_id for request in scheduler.running}
    if remote is not None:  # those that load, or have loaded
        others |= {request.request_id for request in scheduler.requests.values() if request.kv.block_ids}
    assert requests.keys() == others
    owners = [*requests.values()]
    if remote is not None:  # those that have ended
        ended = [*remote._held.values(), *(each.kv for each in remote._loading.values() if each.is_finished)]
        owners += [kv.state for kv in ended if kv.state is not None]
    slots = [slot for state in owners for slot in (state.slot, state.lent_slot, state.draft_slot) if slot >= 0]
    drafting = [each for each in scheduler.requests.values() if each.kv.state and each.kv.state.draft_slot >= 0]
    assert all(request.num_output_placeholders > 1 for request in drafting), "no step in flight verifies the drafts"
    held = Counter([*slots, *states._read, *(kept.slot for kept in states._kept)])
    pool = states.pool
    assert pool.ref_counts == [held[slot] for slot in range(pool.num_blocks)]
    free = [*pool._blank, *pool._cached, *pool._demoted]
    assert sorted(free) == sorted(set(range(pool.num_blocks)) - set(held))
    assert len(free) == pool.num_free
    registered = {slot: name for slot, name in enumerate(pool._hashes) if name is not None}
    assert registered == {slot: name for name, slot in pool._by_hash.items()}
    assert pool._by_hash.keys() - pool.parked <= scheduler.kv.pool._by_hash.keys()
    assert pool.parked <= pool._by_hash.keys()
    assert scheduler.kv.pool.parked <= scheduler.kv.pool._by_hash.keys()
    assert states._prompts.keys() <= requests.keys()
    own = Counter(state.slot for state in owners if not state.is_kept)
    assert all(count == 1 == pool.ref_counts[slot] for slot, count in own.items())
    assert own.keys().isdisjoint(registered)


def check_counts(scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
    """Check that each request of a planned step computes at least one token, and all together no more than a step may,
    drafts aside: these take what is left over of the budget too."""
    counts = scheduled.num_scheduled_tokens
    assert min(counts.values(), default=1) >= 1, counts
    assert sum(counts.values()) == scheduled.total_num_scheduled_tokens <= scheduler.config.max_num_batched_tokens


def _check_order(scheduler: Scheduler) -> None:
    """Check that requests are in the order of the policy; without external KV no request overtakes another one of its
    tenant."""
    if scheduler.config.policy == "priority":
        assert scheduler.running == sorted(scheduler.running, key=priority_key)
    for tenant in {request.tenant for request in scheduler.requests.values()}:
        running = [request for request in scheduler.running if request.tenant == tenant]
        waiting = [request for request in scheduler.waiting if request.tenant == tenant]
        if scheduler.config.policy == "priority":
            assert waiting == sorted(waiting, key=priority_key)
        elif scheduler._remote is None and (scheduler.media is None or not scheduler.media.num_asked):
            arrivals = [request.times.arrival_ns for request in [*running, *waiting]]
            assert arrivals == sorted(arrivals)


def check_pool(pool: BlockPool, holders: Iterable[RequestKV], lent: Iterable[list[int]] = ()) -> None:
    """Check that free and used blocks add up, references are counted, and a block can be hit if it has a hash."""
    tables = [kv.block_ids + kv.reserved_block_ids + kv.cross_block_ids for kv in holders] + list(lent)
    held = Counter(block_id for block_ids in tables for block_id in block_ids)
    first = 0
    if pool.num_groups > 1:  # the null block is no one's
        del held[NULL_BLOCK]
        first = 1
        assert pool.ref_counts[NULL_BLOCK] > 1 << 60
    assert pool.wrong <= held.keys()
    assert pool.ref_counts[first:] == [held[block_id] for block_id in range(first, first + pool.num_blocks)]
    free = [*reversed(pool._blank), *pool._demoted, *pool._cached, *pool.kept._kept_in]
    assert len(pool.kept._kept_in) == pool.kept.num_blocks
    assert len(free) == pool.num_free == pool.num_blocks - len(held)
    assert set(free) == set(range(first, first + pool.num_blocks)) - set(held)
    registered = {block_id: block_hash for block_id, block_hash in enumerate(pool._hashes) if block_hash is not None}
    assert registered == {block_id: block_hash for block_hash, block_id in pool._by_hash.items()}
    assert [block_id in registered for block_id in free] == sorted(block_id in registered for block_id in free)


def check_idle(scheduler: Scheduler) -> None:
    """Check that no request is live and no block leaked."""
    check_scheduler(scheduler)
    assert not scheduler.requests
    assert scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks
    stats = scheduler.stats()
    assert (stats.kv_usage, stats.num_leases) == (0.0, 0)


def _check_content(scheduler: Scheduler) -> None:
    """Check that a block can be hit only if it is full, and only by the tokens it holds; shared blocks can be hit."""
    pool, size, num_groups = scheduler.kv.pool, scheduler.kv.block_size, scheduler.kv.pool.num_groups
    for request in scheduler.running:
        num_known = min(request.kv.num_computed_tokens, request.num_tokens)
        tokens, salt = request.all_token_ids[:num_known], request.kv.cache_salt
        hashes = block_hashes(tokens, size, salt=salt, media=request.kv.media)
        num_computed_blocks = -(-num_known // size)
        for group in range(num_groups):
            keys = [group_key(block_hash, group) for block_hash in hashes] if num_groups > 1 else hashes
            for block_id, key in zip_longest(request.kv.block_ids[group::num_groups][:num_computed_blocks], keys):
                assert pool._hashes[block_id] in (None, key)
                assert pool.ref_counts[block_id] == 1 or key is not None

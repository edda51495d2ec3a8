"""Slots of states: what a step reads and writes, what is kept of prompts, and what is found again."""

import pytest

from tokenloom.engine_core.data.config import CacheConfig
from tokenloom.engine_core.data.kv_groups import KVCacheConfig
from tokenloom.engine_core.data.request import RequestKV
from tokenloom.engine_core.data.scheduler_output import StateRun
from tokenloom.engine_core.kv_cache.state_kv_cache_manager import StateKVCacheManager

SIZE = 4


def make(num_slots: int = 8, chunk: int = 1, *, every: bool = False, caching: bool = True) -> StateKVCacheManager:
    kv_cache = KVCacheConfig(100, 400, num_state_slots=num_slots, state_chunk=chunk, keeps_every_state=every)
    return StateKVCacheManager(kv_cache, CacheConfig(block_size=SIZE, enable_prefix_caching=caching))


def begin(manager: StateKVCacheManager, name: str, token_ids: list[int], count: int | None = None) -> RequestKV:
    """Admit a request and compute ``count`` tokens of it, or all."""
    request = RequestKV(name, token_ids)
    hits = manager.find_cached_blocks(request)
    assert manager.can_admit(request, hits, len(token_ids), 0)
    manager.admit(request, hits)
    compute(manager, request, len(token_ids) - request.num_computed_tokens if count is None else count)
    return request


def compute(manager: StateKVCacheManager, request: RequestKV, count: int) -> None:
    assert manager.allocate(request, count) is not None
    request.num_computed_tokens += count


def spans(manager: StateKVCacheManager) -> list[tuple[int, int, int]]:
    return [(run.num_tokens, run.read, run.written) for run in manager.states.runs]


def step(manager: StateKVCacheManager) -> list[StateRun]:
    runs = manager.states.take_runs()
    manager.states.begin_step()
    return runs


def test_a_prompt_keeps_its_last_boundary_and_decodes_in_its_own_slot() -> None:
    manager = make()
    request = begin(manager, "a", list(range(11)))
    [(prompt, none, kept), (tail, read, own)] = spans(manager)
    assert (prompt, none, tail) == (8, -1, 3)
    assert kept == read != own
    step(manager)
    request.all_token_ids.append(50)
    compute(manager, request, 1)
    assert spans(manager) == [(1, own, own)]
    assert manager.states.pool.content_of(kept) == request.block_hashes[1]
    assert manager.states.pool.num_free == 7, "what is kept is free for a request that needs it more"


def test_a_hit_begins_with_what_is_kept_and_changes_nothing_of_it() -> None:
    manager = make()
    first = begin(manager, "a", list(range(11)))
    [(_, _, kept), _] = spans(manager)
    step(manager)
    second = begin(manager, "b", [*range(8), 70, 71])
    third = begin(manager, "c", [*range(8), 80])
    assert second.num_computed_tokens - 2 == third.num_computed_tokens - 1 == 8
    (two, read_by_two, two_slot), (one, read_by_three, three_slot) = spans(manager)
    assert (two, one, read_by_two, read_by_three) == (2, 1, kept, kept)
    assert len({kept, two_slot, three_slot}) == 3
    for request in (first, second, third):
        manager.free(request)
    step(manager)
    assert manager.states.pool.num_free == 8


def test_what_a_step_writes_is_hit_from_the_next_one_on() -> None:
    manager = make()
    begin(manager, "a", list(range(11)))
    sibling = RequestKV("b", list(range(11)))
    assert manager.find_cached_blocks(sibling) == []
    assert not manager.can_admit(sibling, [], 11, 0), "it waits a step, and shares the prompt then"
    assert manager.can_admit(RequestKV("c", [9] * 11), [], 11, 0)
    assert manager.finds_more(sibling, 0) is False
    step(manager)
    assert manager.finds_more(sibling, 0)
    assert manager.can_admit(sibling, manager.find_cached_blocks(sibling), 11, 0)


def test_a_prompt_that_is_still_computed_is_waited_for_until_it_ends() -> None:
    manager = make()
    first = begin(manager, "a", list(range(40)), 4)
    step(manager)
    sibling = RequestKV("b", [*range(38), 60, 61])
    assert not manager.can_admit(sibling, [], 40, 0)
    manager.free(first)
    assert manager.can_admit(sibling, [], 40, 0)


def test_a_prompt_that_gets_one_token_a_step_keeps_its_state_and_is_not_waited_for_any_longer() -> None:
    """As beside a longer prompt, or beside another tenant: what follows used to wait until its output ended."""
    manager = make()
    first = begin(manager, "a", list(range(10)), 7)
    step(manager)
    sibling = RequestKV("b", [*range(8), 60, 61])
    assert not manager.can_admit(sibling, [], 10, 0), "it waits for the state after 8 tokens"
    for _ in range(2):
        compute(manager, first, 1)
        step(manager)
    hits = manager.find_cached_blocks(sibling)
    assert len(hits) == 2
    assert manager.can_admit(sibling, hits, 10, 0)


def test_without_a_free_slot_what_could_be_hit_goes() -> None:
    manager = make(num_slots=2)
    request = begin(manager, "a", list(range(12)), 8)
    step(manager)
    other = begin(manager, "b", [9] * 3)
    assert not manager.can_admit(RequestKV("c", [1, 2]), [], 2, 0), "no slot is free"
    [kept] = [slot for slot in range(2) if manager.states.pool.content_of(slot)]
    compute(manager, request, 4)
    assert spans(manager)[1:] == [(4, kept, kept)], "its own state changes in place, and is not found any more"
    assert manager.states.pool.content_of(kept) is None
    manager.free(request)
    manager.free(other)
    step(manager)
    assert manager.states.pool.num_free == 2


def test_a_state_goes_with_its_block() -> None:
    manager = make()
    request = begin(manager, "a", list(range(11)))
    step(manager)
    manager.free(request)
    assert len(manager.states.pool._by_hash) == 1
    manager.pool.allocate(manager.pool.num_free)
    assert not manager.states.pool._by_hash


def test_nothing_of_a_lost_step_is_kept() -> None:
    manager = make()
    request = begin(manager, "a", list(range(11)))
    manager.free(request)
    manager.pool.forget_all()
    step(manager)
    assert not manager.states.pool._by_hash
    assert manager.states.pool.num_free == 8


def test_nothing_of_a_useless_request_is_kept() -> None:
    manager = make()
    request = begin(manager, "a", list(range(11)))
    manager.forget(request)
    manager.free(request)
    step(manager)
    assert not manager.states.pool._by_hash


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    manager = make(caching=False)
    begin(manager, "a", list(range(11)))
    assert [count for count, _, _ in spans(manager)] == [11]


def test_a_conversation_keeps_its_latest_state() -> None:
    """The state that a turn began with is replaced first; one that two requests began with is not."""
    manager = make(num_slots=4)
    tokens = list(range(9))
    for turn in range(3):
        manager.free(begin(manager, f"turn {turn}", tokens))
        step(manager)
        tokens = [*tokens, *range(100 * turn + 100, 100 * turn + 108)]
    first, second, latest = manager.states.pool._by_hash
    assert next(iter(manager.states.pool._demoted)) == manager.states.pool.find(second)
    manager.free(begin(manager, "other", [*range(8), 99]))
    step(manager)
    manager.free(begin(manager, "another", list(range(50, 59))))
    step(manager)
    assert manager.states.pool.find(second) is None
    assert manager.states.pool.find(first) is not None
    assert manager.states.pool.find(latest) is not None


def test_the_state_where_the_user_spoke_outlives_those_of_the_loop_behind_it() -> None:
    """A template drops what the model thought when the user speaks again: the next prompt goes on from there."""
    manager = make(num_slots=6)
    told = list(range(9))
    for spoken in range(3):
        found = len(manager.find_cached_blocks(RequestKV("look", told))) * SIZE
        assert found == (len(told) - 5 if spoken else 0), "what the prompt before the loop has kept"
        tokens = told
        for turn in range(8):  # more than there are slots
            manager.free(begin(manager, f"spoken {spoken}, turn {turn}", tokens))
            step(manager)
            first = 1000 * spoken + 100 * turn + 100
            tokens = [*tokens, *range(first, first + SIZE)]
        told = [*told, *range(5000 + 100 * spoken, 5000 + 100 * spoken + SIZE)]


def test_a_fork_of_prompts_keeps_a_state() -> None:
    """The second request of a system prompt finds its KV without a state, and keeps one there for the third."""
    manager = make()
    manager.states.fork_tokens = 8
    system = list(range(16))
    manager.free(begin(manager, "a", [*system, *range(30, 47)]))
    step(manager)
    begin(manager, "b", [*system, *range(50, 67)])
    assert [count for count, _, _ in spans(manager)] == [16, 16, 1]
    step(manager)
    assert begin(manager, "c", [*system, 90]).num_computed_tokens == 17
    assert [count for count, _, _ in spans(manager)] == [1]


def test_long_prompts_keep_states_on_their_way() -> None:
    manager = make()
    manager.states.far_tokens = 12
    begin(manager, "a", list(range(31)))
    assert [count for count, _, _ in spans(manager)] == [12, 12, 4, 3]


def test_small_states_are_kept_at_each_block_of_prompt_and_output() -> None:
    manager = make(every=True)
    request = begin(manager, "a", list(range(11)))
    assert [count for count, _, _ in spans(manager)] == [4, 4, 3]
    step(manager)
    request.all_token_ids += [40]
    compute(manager, request, 1)
    step(manager)
    assert manager.find_cached_blocks(RequestKV("b", [*request.all_token_ids, 1])) == request.block_ids[:3]


def test_a_token_in_flight_is_known_a_step_later() -> None:
    """With steps in flight a block ends with a token that is sampled meanwhile."""
    manager = make(every=True)
    request = begin(manager, "a", list(range(7)))
    step(manager)
    compute(manager, request, 1)
    request.all_token_ids += [40]
    step(manager)
    assert manager.find_cached_blocks(RequestKV("b", [*range(7), 40, 1])) == request.block_ids[:2]


def decode_with_drafts(manager: StateKVCacheManager, num_drafts: int) -> tuple[RequestKV, list[tuple[int, int, int]]]:
    request = begin(manager, "a", list(range(11)))
    step(manager)
    request.all_token_ids.append(50)
    compute(manager, request, 1)
    begin(manager, "b", [9] * 3)
    assert manager.extend(request, 1, num_drafts) is not None
    manager.states.add_drafts(request, num_drafts)
    request.num_computed_tokens += num_drafts
    runs = [(run.num_tokens, run.read, run.written) for run in step(manager) if run.req_id == "a"]
    return request, runs


@pytest.mark.parametrize(("chunk", "counts"), [(1, [1, 3]), (8, [1, 1, 1, 1])])
def test_drafts_get_a_state_of_their_own(chunk: int, counts: list[int]) -> None:
    manager = make(chunk=chunk)
    request, runs = decode_with_drafts(manager, 3)
    own, drafted = runs[0][2], runs[-1][2]
    assert [count for count, _, _ in runs] == counts
    assert own != drafted == runs[1][2]
    assert manager.states.verified(request, 3, 3) == 3, "all were right: their state is the request's"
    assert request.state is not None
    assert request.state.slot == drafted


def test_a_wrong_draft_costs_no_state() -> None:
    """The state before the drafts is still there; those that were right are computed again with the next token."""
    manager = make()
    request, runs = decode_with_drafts(manager, 3)
    assert manager.states.verified(request, 3, 2) == 0
    request.num_computed_tokens -= 3
    request.all_token_ids += [51, 52, 53]
    compute(manager, request, 3)
    own = runs[0][2]
    assert spans(manager) == [(3, own, own)]
    free = manager.states.pool.num_free
    manager.free(request)
    assert manager.states.pool.num_free == free + 1


class TestStrict:
    """States whose bits depend on where prompts are cut: chunks of 8 tokens."""

    @pytest.mark.parametrize(
        ("begun", "length", "budget", "count"),
        [(0, 30, 20, 16), (0, 30, 7, 0), (16, 30, 14, 14), (0, 17, 16, 8), (8, 17, 8, 0), (8, 17, 9, 9), (0, 9, 8, 0)],
    )
    def test_chunks_end_where_the_kernel_s_do(self, begun: int, length: int, budget: int, count: int) -> None:
        states = make(chunk=8).states
        request = RequestKV("a", [0] * length)
        request.num_computed_tokens = begun
        assert states.whole_chunks(request, budget, budget) == count
        fewest = states.fewest_tokens(request, begun)
        assert states.whole_chunks(request, fewest, fewest) == fewest <= states.most_of_chunk
        assert states.whole_chunks(request, 1, fewest) == fewest, "its tenant's share ends within a chunk"

    def test_two_tokens_of_a_prompt_are_left(self) -> None:
        manager = make(chunk=8)
        begin(manager, "a", list(range(20)))
        assert [count for count, _, _ in spans(manager)] == [16, 4]
        step(manager)
        assert len(manager.find_cached_blocks(RequestKV("b", list(range(18))))) == 4
        assert manager.find_cached_blocks(RequestKV("c", list(range(17)))) == []

    def test_no_block_of_an_output_is_found(self) -> None:
        manager = make(chunk=8, every=True)
        request = begin(manager, "a", list(range(6)))
        for token_id in range(40, 60):
            step(manager)
            request.all_token_ids.append(token_id)
            compute(manager, request, 1)
        assert request.num_registered_blocks == 1
        assert not manager.states.pool._by_hash

    def test_an_output_is_computed_again_token_by_token(self) -> None:
        """So a request that was preempted, or goes on after another engine, has the states that it had."""
        manager = make(chunk=8)
        request = RequestKV("a", list(range(22)))
        request.num_prompt_tokens = 18
        manager.admit(request, [])
        compute(manager, request, 22)
        assert [count for count, _, _ in spans(manager)] == [16, 2, 1, 1, 1, 1]


END = 399


def chat(*messages: list[int], header: int = 3) -> list[int]:
    """Return a prompt of messages that a stop token ends, with the tokens that open the answer."""
    return [token for message in messages for token in (*message, END)] + list(range(300, 300 + header))


def begin_chat(manager: StateKVCacheManager, name: str, token_ids: list[int]) -> RequestKV:
    request = RequestKV(name, token_ids)
    request.stop_token_ids = frozenset({END})
    manager.admit(request, manager.find_cached_blocks(request))
    compute(manager, request, len(token_ids) - request.num_computed_tokens)
    step(manager)
    return request


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_changed_last_message_begins_behind_the_one_before(chunk: int) -> None:
    manager = make(chunk=chunk)
    system = list(range(14))
    manager.free(begin_chat(manager, "a", chat(system, list(range(30, 50)))))
    changed = RequestKV("b", chat(system, list(range(60, 75))))
    assert len(manager.find_cached_blocks(changed)) * SIZE == 12, "the whole blocks of the first message"


def test_of_states_that_turns_have_left_behind_the_latest_stay() -> None:
    """A template that drops earlier thinking goes on from a state of some turns ago; often from the first one."""
    manager = make(num_slots=6)
    tokens = list(range(9))
    names = list[bytes]()
    for turn in range(8):
        request = begin(manager, f"turn {turn}", tokens)
        names.append(request.block_hashes[(len(tokens) - 1) // SIZE - 1])
        manager.free(request)
        step(manager)
        tokens = [*tokens, *range(100 * turn + 100, 100 * turn + 100 + SIZE)]
    assert [manager.states.pool.find(name) is not None for name in names] == [True] + [False] * 3 + [True] * 4


def test_a_state_lies_before_what_opens_the_answer() -> None:
    """A template may write other tokens there when the answer has become a message of the history."""
    manager = make()
    manager.free(begin_chat(manager, "a", chat(list(range(18)), header=3)))
    later = RequestKV("b", [*range(18), END, 7, 8, 9, *range(50, 60)])
    assert len(manager.find_cached_blocks(later)) * SIZE == 16


def test_ends_of_earlier_messages_are_given_up_first() -> None:
    manager = make(num_slots=4)
    manager.free(begin_chat(manager, "a", chat(list(range(14)), list(range(30, 50)))))
    earlier, last = manager.states.pool._by_hash
    assert next(iter(manager.states.pool._demoted)) == manager.states.pool.find(earlier)
    for index in range(2):
        manager.free(begin_chat(manager, f"b{index}", list(range(100 + 20 * index, 117 + 20 * index))))
    assert manager.states.pool.find(earlier) is None
    assert manager.states.pool.find(last) is not None


def test_a_prompt_without_stop_tokens_keeps_its_end_alone() -> None:
    manager = make()
    manager.free(begin_chat(manager, "a", list(range(30))))
    assert len(manager.states.pool._by_hash) == 1


def decode(manager: StateKVCacheManager, request: RequestKV, count: int) -> None:
    for number in range(count):
        request.all_token_ids.append(200 + number)
        compute(manager, request, 1)
        step(manager)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_preempted_request_goes_on_where_it_was(chunk: int) -> None:
    manager = make(chunk=chunk)
    request = begin(manager, "a", list(range(11)))
    step(manager)
    decode(manager, request, 4)
    assert request.state is not None
    slot, table = request.state.slot, request.block_ids
    manager.park(request)
    manager.free(request)
    request.all_token_ids.append(250)
    hits = manager.find_cached_blocks(request)
    assert (hits, manager.num_hit_tokens(hits, request)) == (table, 15)
    other = RequestKV("b", [*request.all_token_ids, 1])
    assert manager.num_hit_tokens(manager.find_cached_blocks(other), other) == 8, "no other prompt finds it"
    assert manager.can_admit(request, hits, 16, 0)
    manager.admit(request, hits)
    compute(manager, request, 1)
    assert spans(manager) == [(1, slot, slot)]
    assert not manager.pool.parked | manager.states.pool.parked
    manager.free(request)


@pytest.mark.parametrize("takes_slot", [False, True])
def test_a_preempted_request_begins_at_its_prompt_if_others_needed_a_part(takes_slot: bool) -> None:
    manager = make(num_slots=4)
    request = begin(manager, "a", list(range(11)))
    step(manager)
    decode(manager, request, 3)
    assert request.state is not None
    slot = request.state.slot
    manager.park(request)
    manager.free(request)
    pool = manager.states.pool if takes_slot else manager.pool
    manager.states.pool.demote(slot)
    pool.release(pool.allocate(pool.num_blank + 1))
    hits = manager.find_cached_blocks(request)
    assert manager.num_hit_tokens(hits, request) == 8
    manager.admit(request, hits)
    assert request.num_computed_tokens == 8


@pytest.mark.parametrize("is_lost", [False, True])
def test_what_a_preempted_request_will_not_find_displaces_nothing(is_lost: bool) -> None:
    """It was found by no other request, and yet freed last: snapshots of prompts went before it."""
    manager = make(num_slots=4)
    blanks = manager.pool.num_blank, manager.states.pool.num_blank
    request = begin(manager, "a", list(range(11)))
    step(manager)
    decode(manager, request, 3)
    manager.park(request)
    manager.free(request)
    if is_lost:
        manager.pool.forget_content([request.block_hashes[1]])
        assert manager.find_cached_blocks(request) == []
    manager.free(request)
    assert not manager.pool.parked | manager.states.pool.parked
    num_named = 1 if is_lost else 2
    assert manager.pool.num_blank == blanks[0] - num_named
    assert manager.states.pool.num_blank == blanks[1] - (not is_lost)


def test_nothing_is_found_of_a_request_that_proves_useless_after_it_was_preempted() -> None:
    """As with overlapping steps, where one is planned before the logits of the one before are known."""
    manager = make()
    request = begin(manager, "a", list(range(11)))
    step(manager)
    manager.park(request)
    manager.free(request)
    manager.forget(request)
    assert manager.find_cached_blocks(RequestKV("b", list(range(11)))) == []
    assert manager.find_cached_blocks(request) == []
    assert not manager.states.pool._by_hash

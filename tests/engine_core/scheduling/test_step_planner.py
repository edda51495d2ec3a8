import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.engine_core.helpers import VOCAB_SIZE, make_config, make_request
from tests.engine_core.invariants import check_counts
from tests.engine_core.media import RowClient, image, make_media
from tests.engine_core.planned_steps import TimedSteps, make_scheduler, step
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.embedding_rows import EmbedsSpan
from tokenloom.engine_core.data.scheduler_output import ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.scheduling.scheduler import Scheduler
from tokenloom.engine_core.scheduling.step_planner import PauseState


def test_a_long_prefill_leaves_room_for_short_ones() -> None:
    scheduler = make_scheduler(long_prefill_token_threshold=8, max_num_batched_tokens=64)
    scheduler.add_request(make_request("long", [1] * 30))
    scheduler.add_request(make_request("short", [2] * 5))
    assert scheduler.schedule().num_scheduled_tokens == {"long": 8, "short": 5}


def test_a_prompt_gets_less_while_anything_decodes() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=8)
    scheduler.add_request(make_request("a", [1] * 40))
    assert step(scheduler)[0].total_num_scheduled_tokens == 32
    scheduler.add_request(make_request("b", [2] * 40))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 8, "b": 24}
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 8}


def test_prompts_get_more_where_more_of_them_wait_than_decode() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=4)
    scheduler.add_request(make_request("a", [1], 20))
    step(scheduler)
    for request_id, token in (("b", 2), ("c", 3), ("d", 4)):
        scheduler.add_request(make_request(request_id, [token] * 10, 20))
    steps = [step(scheduler)[0].num_scheduled_tokens for _ in range(4)]
    assert steps == [
        {"a": 1, "b": 10, "c": 2},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 4},
        {"a": 1, "b": 1, "c": 1, "d": 4},
    ]


def test_a_request_without_a_row_adds_no_budget() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=4, max_num_seqs=2)
    scheduler.add_request(make_request("a", [1]))
    step(scheduler)
    for request_id in "bcd":
        scheduler.add_request(make_request(request_id, [2] * 20))
    assert step(scheduler)[0].num_scheduled_tokens == {"a": 1, "b": 4}


def test_no_running_request_is_left_out() -> None:
    scheduler = make_scheduler(prefill_tokens_beside_decode=2)
    for request_id in "abcd":
        scheduler.add_request(make_request(request_id, [1]))
    step(scheduler)
    assert len(step(scheduler)[0].num_scheduled_tokens) == 4


def slow_scheduler(**settings: object) -> Scheduler:
    """Return a scheduler with 16 short and 16 longer prompts: a step in which the former decode has four tokens for the
    latter."""
    scheduler = make_scheduler(
        num_blocks=1000,
        **{"max_num_seqs": 32, "max_num_batched_tokens": 128, "long_prefill_token_threshold": 4}
        | {"prefill_tokens_beside_decode": 4}
        | settings,
    )
    for n in range(32):
        request = make_request(f"r{n}", [n] * (3 if n < 16 else 40), 50, tenant="a")
        with_logprobs = replace(request.sampling_params, logprobs=1 if n < 16 else None)
        scheduler.add_request(replace(request, sampling_params=with_logprobs))
    return scheduler


def test_prompts_that_outnumber_the_tokens_of_their_share_get_one_each() -> None:
    scheduler = slow_scheduler()
    assert len(step(scheduler)[0].num_scheduled_tokens) == 32
    assert step(scheduler)[0].num_scheduled_tokens == {f"r{n}": 1 for n in range(32)}
    for _ in range(200):
        step(scheduler)
    assert not scheduler.requests


def end_step(scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
    """Answer a token for each request of a step that has a placeholder for one."""
    requests = [scheduler.requests[each] for each in scheduled.num_scheduled_tokens]
    sampled = [[50] if each.num_output_placeholders else [] for each in requests]
    scheduler.results.apply(scheduled, ModelRunnerOutput(list(scheduled.num_scheduled_tokens), sampled))


def test_prompts_get_a_token_each_in_the_steps_of_all_stages() -> None:
    scheduler = slow_scheduler(num_stages=2)
    begun: list[SchedulerOutput] = []
    for _ in range(600):
        scheduled = scheduler.schedule()
        check_counts(scheduler, scheduled)
        if scheduled.num_scheduled_tokens:
            begun.append(scheduled)
        if len(begun) == 2 or not scheduled.num_scheduled_tokens:
            end_step(scheduler, begun.pop(0))
        if not scheduler.requests:
            return
    raise AssertionError(f"{len(scheduler.requests)} requests never ended")


def test_a_step_whose_costly_rows_need_not_wait_leaves_those_of_another_stage() -> None:
    """The rows with log probabilities waited for a request of another tenant, which has no room after all."""
    scheduler = slow_scheduler(num_stages=2, max_num_seqs=33)
    end_step(scheduler, scheduler.schedule())
    scheduler.kv.pool.allocate(scheduler.kv.pool.num_free - 10)
    scheduler.add_request(make_request("c", [9] * 99, 1, tenant="c"))
    first = scheduler.schedule()
    check_counts(scheduler, first)
    second = scheduler.schedule()
    check_counts(scheduler, second)
    assert all(request.num_output_placeholders <= 1 for request in scheduler.running)
    assert len(first.num_scheduled_tokens) == 16, "one stage's share"


@pytest.mark.parametrize("position", [3, 13, 16, 20])
def test_a_whole_chunk_of_a_state_ends_before_the_first_embedding(position: int) -> None:
    """NaN of an embedding would reach KV of tokens before it, which other prompts share."""
    scheduler = make_scheduler(caching=False, state_chunk=8, num_state_slots=16)
    request = make_request("a", list(range(30)), 1)
    request.prompt_embeds = [EmbedsSpan(position, np.ones((4, 2), np.float32))]
    scheduler.add_request(request)
    ends = [0]
    while ends[-1] < 30:
        ends.append(ends[-1] + step(scheduler)[0].num_scheduled_tokens["a"])
    assert position in ends
    assert all(end % 8 == 0 for end in ends[:-1] if end != position)


@pytest.mark.parametrize("num_requests", [3, 6])
@pytest.mark.parametrize("budget", [24, 32, 48])
def test_a_share_of_less_than_a_whole_chunk_is_rounded_up_before_an_image(budget: int, num_requests: int) -> None:
    """A tenant's share of a step is cut to the rows of the image first, and no token was left of it."""
    config = make_config(block_size=4, num_blocks=400, budget=budget, max_model_len=200, caching=False)
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=16, state_bytes=10_000)
    client = RowClient(EngineCore(config, UniProcExecutor(worker)))
    spans = [image(70, 10, f"image {index}") for index in range(num_requests)]
    requests = [make_media(f"r{index}", span, length=100, tenant=f"t{index % 3}") for index, span in enumerate(spans)]
    client.add(*requests)
    client.finish()
    assert [len(client.tokens[request.request_id]) for request in requests] == [5] * num_requests


@pytest.mark.parametrize("state", [PauseState.UNPAUSED, PauseState.PAUSED_NEW])
def test_no_tokens_are_left_for_a_request_that_cannot_begin(state: PauseState) -> None:
    """It is more urgent than the prompt that has begun, and there is no room for it, or a pause."""
    scheduler = make_scheduler(num_blocks=20 if state is PauseState.UNPAUSED else 60, prefill_tokens_beside_decode=8)
    scheduler.add_request(make_request("a", [1] * 4, 40))
    step(scheduler)
    scheduler.add_request(make_request("long", [2] * 60, 1))
    step(scheduler)
    scheduler.set_pause_state(state)
    scheduler.add_request(make_request("short", [3] * 20, 1))
    chunks = []
    while "long" in scheduler.requests:
        chunks.append(step(scheduler)[0].num_scheduled_tokens.get("long", 0))
    assert chunks.count(1) <= 1, "one step shows that the other cannot begin"
    assert len(chunks) <= 8


def begin_long(num_tokens: int) -> TimedSteps:
    """Return a scheduler of which a request decodes, and another one has begun a long prompt."""
    steps = TimedSteps(0.05, 0.0025, 0.0011, 0.02)
    steps.add("stream", 30, 500)
    steps.step()
    steps.add("long", num_tokens, 5)
    steps.step()
    return steps


def test_a_wait_for_blocks_is_not_made_up_for() -> None:
    """Requests that had waited for blocks stopped all streams for a full step each."""
    steps = begin_long(600)
    while "long" not in steps.first:
        steps.step()
    pool = steps.scheduler.kv.pool
    taken = pool.allocate(pool.num_free - 4)
    steps.add("other", 3000, 5)
    steps.now += 60.0
    for _ in range(2):
        assert "other" not in steps.step().num_scheduled_tokens
    pool.release(taken)
    counts = [steps.step().num_scheduled_tokens["other"] for _ in range(2)]
    assert max(counts) < 200


def test_requests_count_whose_tokens_a_more_urgent_prompt_has_used() -> None:
    """Every second step was the smaller, as if they could not begin."""
    steps = begin_long(4000)
    for number in range(3):
        steps.add(f"later {number}", 4000, 5)
    counts = [steps.step().num_scheduled_tokens["long"] for _ in range(6)]
    assert counts == sorted(counts)


_ARRIVALS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 12), st.sampled_from("aab"), st.integers(0, 1)),
    min_size=4,
    max_size=24,
)


def run_arrivals(arrivals: list[tuple[int, int, int, str, int]], num_blocks: int = 60, policy: str = "priority") -> int:
    """Serve requests that arrive with their step, length, output, tenant and priority; return in how many steps some
    were held that decode. The costs of steps are known, and such that a burst is computed in several."""
    scheduler = make_scheduler(
        num_blocks=num_blocks, prefill_tokens_beside_decode=2, max_num_batched_tokens=64, policy=policy
    )
    share = scheduler._planner.prompt_share
    assert share is not None
    share.observe(100, 1.0)
    share.observe(0, 0.01)  # the time of one prompt token, so that eight are computed at once
    left, num_held = sorted(arrivals), 0
    for number in range(3000):
        while left and left[0][0] <= number:
            _, length, max_tokens, tenant, priority = left.pop(0)
            prompt = [len(left), *[1] * (length - 1)]
            request = make_request(f"r{len(left)}", prompt, max_tokens, tenant=tenant)
            scheduler.add_request(replace(request, priority=priority if policy == "priority" else 0))
        decoding = {each.request_id for each in scheduler.running if each.num_missing_tokens == 1}
        scheduled = step(scheduler)[0]
        num_held += bool(decoding - scheduled.num_scheduled_tokens.keys() - set(scheduled.preempted_req_ids))
        if not left and not scheduler.requests:
            return num_held
    raise AssertionError(f"still there: {list(scheduler.requests)}")


@given(_ARRIVALS, st.sampled_from([25, 40, 200]), st.sampled_from(["fcfs", "priority"]))
@settings(max_examples=80, deadline=None)
def test_every_request_ends_whatever_is_held_for_others(
    arrivals: list[tuple[int, int, int, str, int]], num_blocks: int, policy: str
) -> None:
    run_arrivals(arrivals, num_blocks, policy)


def test_requests_that_decode_are_held_for_a_burst_and_not_for_another_tenant() -> None:
    burst = [(4, 20, 4, "a", 0)] * 6
    assert run_arrivals([(0, 5, 40, "a", 0), *burst], num_blocks=200) > 0
    assert run_arrivals([(0, 5, 40, "b", 0), *burst], num_blocks=200) == 0

"""Drafts with steps that overlap: a step is planned before it is known which drafts of the one before it are right."""

import random
from typing import Any

import pytest
from msgspec.structs import replace

from tests.engine_core.executor.late import EXECUTORS, LateExecutor
from tests.engine_core.helpers import VOCAB_SIZE, finish, lose_steps, make_config, make_request, make_worker, tokens_of
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_cache.grouped_hash_worker import WINDOWS, GroupedHashWorker
from tests.engine_core.media import RowClient, expected, image, make_media
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import EngineConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.data.scheduler_output import (
    UNKNOWN_DRAFT,
    CachedRequestData,
    SchedulerOutput,
)
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens

PROMPT = [1, 2, 3]


def make_core(executor: str = "late", worker: Worker | None = None, **settings: Any) -> EngineCore:
    config = make_config(async_scheduling=True, **settings)
    core = EngineCore(config, EXECUTORS[executor](worker or make_worker(config)))
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.costs = None
    return core


def counted(core: EngineCore) -> SpecDecodingStats:
    found = core.scheduler.stats().spec_decoding
    assert found is not None
    return found


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """The steps as executors got them."""
    steps: list[SchedulerOutput] = []
    execute = LateExecutor.execute_model

    def note(self: LateExecutor, scheduled: SchedulerOutput) -> None:
        steps.append(scheduled)
        execute(self, scheduled)

    monkeypatch.setattr(LateExecutor, "execute_model", note)
    return steps


@pytest.mark.parametrize("executor", ["late", "threaded"])
@pytest.mark.parametrize("draft_model", ["", "small"])
@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.7, 1.0])
def test_tokens_are_those_without_drafts(accuracy: float, draft_model: str, executor: str) -> None:
    core = make_core(executor, num_drafts=6, draft_accuracy=accuracy, draft_model=draft_model)
    for index in range(3):
        core.add_request(make_request(f"r{index}", PROMPT * (index + 1), 50))
    most_in_flight, outputs = 0, {f"r{index}": list[int]() for index in range(3)}
    while core.has_work():
        for output in core.step().outputs:
            outputs[output.request_id] += output.new_token_ids
        most_in_flight = max(most_in_flight, len(core.steps_in_flight))
    assert list(outputs.values()) == [expected_tokens(PROMPT * (index + 1), 50, VOCAB_SIZE) for index in range(3)]
    assert most_in_flight == 1, "besides the one that the latest turn ended"
    stats = counted(core)
    assert stats.num_draft_tokens > 0
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    assert (stats.num_accepted_tokens > 0) == (accuracy > 0)
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (accuracy == 1)
    check_idle(core.scheduler)
    core.shutdown()


def test_plans_name_the_number_of_drafts_alone(planned: list[SchedulerOutput]) -> None:
    core = make_core(num_drafts=4, draft_accuracy=0.5)
    core.add_request(make_request("a", PROMPT, 30))
    finish(core)
    assert all(step.defers_drafts for step in planned)
    drafts = [each for step in planned for each in step.draft_token_ids.values()]
    assert {token_id for each in drafts for token_id in each} == {UNKNOWN_DRAFT}
    assert max(map(len, drafts)) == 4


def test_right_drafts_save_steps(planned: list[SchedulerOutput]) -> None:
    core = make_core(num_drafts=6, draft_accuracy=1.0)
    core.add_request(make_request("a", PROMPT, 1 + 7 * 5))
    finish(core)
    assert len(planned) == 1 + 5


def test_a_plan_becomes_what_a_worker_knows() -> None:
    cached = CachedRequestData(["a", "b", "c"], [[], [], []], [20, 30, 40], {})
    scheduled = {"a": 4, "b": 1, "c": 3}
    step = SchedulerOutput(
        [], cached, scheduled, 8, [], [], {"a": [-1] * 3, "b": [], "c": [-1] * 2}, defers_drafts=True
    )
    known = {"a": 19, "b": 31, "c": 39}
    found = step.with_drafts(known.__getitem__, {"a": [7, 8], "b": [5], "c": [1, 2, 3]})
    assert found.draft_token_ids == {"a": [7, 8], "c": [1, 2]}
    assert found.num_scheduled_tokens == {"a": 3, "b": 1, "c": 3}
    assert list(found.num_scheduled_tokens) == list(scheduled)
    assert found.total_num_scheduled_tokens == 7
    assert found.scheduled_cached_reqs.num_computed_tokens == [18, 30, 38]
    assert (step.num_scheduled_tokens, cached.num_computed_tokens) == (scheduled, [20, 30, 40]), "the plan has changed"


def test_a_step_without_drafts_stays_as_it_was_planned() -> None:
    step = SchedulerOutput([], CachedRequestData(["a"], [[]], [20], {}), {"a": 1}, 1, [], [], defers_drafts=True)
    assert step.with_drafts(dict[str, int]().__getitem__, {"a": [7]}) is step


class SilentWorker(HashWorker):
    """Proposes less than it may: nothing for ``a``, one draft of ``b``. Counts the tokens that its steps compute."""

    def __init__(self, config: EngineConfig, *, vocab_size: int) -> None:
        super().__init__(config, vocab_size=vocab_size)
        self.computed: list[int] = []

    def _with_drafts(self, step: SchedulerOutput) -> SchedulerOutput:
        found = super()._with_drafts(step)
        self.computed.append(found.total_num_scheduled_tokens)
        return found

    def _propose(self, row, count, num_sampled):  # type: ignore[no-untyped-def]
        return super()._propose(row, count, num_sampled)[: "ab".index(row.req_id)]


def test_a_worker_may_propose_less_than_there_is_room_for() -> None:
    config = make_config(async_scheduling=True, num_drafts=5, draft_accuracy=1.0)
    worker = SilentWorker(config, vocab_size=VOCAB_SIZE)
    core = make_core(worker=worker, num_drafts=5, draft_accuracy=1.0, beside_decode=8)
    for name in "ab":
        core.add_request(make_request(name, PROMPT, 21))
    outputs = finish(core)
    assert tokens_of(outputs["a"]) == tokens_of(outputs["b"]) == expected_tokens(PROMPT, 21, VOCAB_SIZE)
    assert outputs["a"][-1].drafts is None, "no draft was verified"
    computed = core.scheduler.stats().num_computed_tokens
    assert computed == sum(worker.computed), "what was planned and not computed does not count"
    drafts = outputs["b"][-1].drafts
    assert drafts is not None
    assert drafts.num_drafts == drafts.num_draft_tokens == drafts.num_accepted_tokens > 5
    check_idle(core.scheduler)


def test_a_stop_token_ends_the_output_within_the_tokens_of_a_step() -> None:
    tokens = expected_tokens(PROMPT, 20, VOCAB_SIZE)
    for place in range(1, 12):
        core = make_core(num_drafts=6, draft_accuracy=1.0)
        params = CoreSamplingParams(max_tokens=20, seed=0, stop_token_ids=(tokens[place],), logprobs=2)
        core.add_request(EngineCoreRequest("a", PROMPT, params))
        outputs = finish(core)["a"]
        end = tokens.index(tokens[place]) + 1
        assert tokens_of(outputs) == tokens[:end]
        assert outputs[-1].finish_reason is FinishReason.STOP
        for output in outputs:
            assert output.new_logprobs is not None
            assert len(output.new_logprobs.sampled) == len(output.new_token_ids)
        check_idle(core.scheduler)


def test_drafts_end_before_the_limit_of_tokens(planned: list[SchedulerOutput]) -> None:
    for max_tokens in range(1, 16):
        core = make_core(num_drafts=6, draft_accuracy=1.0)
        core.add_request(make_request("a", PROMPT, max_tokens))
        assert tokens_of(finish(core)["a"]) == expected_tokens(PROMPT, max_tokens, VOCAB_SIZE)
    for step in planned:
        computed = step.num_computed_tokens()
        assert all(computed[r] + n < len(PROMPT) + 15 for r, n in step.num_scheduled_tokens.items())


@pytest.mark.parametrize("overlaps", [False, True])
def test_proposals_get_no_block_beyond_the_limit_of_tokens(overlaps: bool) -> None:
    config = make_config(async_scheduling=overlaps, num_drafts=6, draft_accuracy=1.0, draft_model="small")
    for max_tokens in range(1, 33):
        core = EngineCore(config, EXECUTORS["late" if overlaps else "uniproc"](make_worker(config)))
        assert core.scheduler.drafts is not None
        core.scheduler.drafts.costs = None
        core.add_request(make_request("a", PROMPT, max_tokens))
        while core.has_work():
            core.step()
            check_scheduler(core.scheduler)


def test_drafts_of_an_ended_request_are_not_given_to_the_next_one_with_its_id() -> None:
    core = make_core(num_drafts=4, draft_accuracy=1.0)
    core.add_request(make_request("a", PROMPT, 40))
    for _ in range(3):
        core.step()
    core.abort_requests(["a"])
    core.add_request(make_request("a", [4, 5], 20))
    assert tokens_of(finish(core)["a"]) == expected_tokens([4, 5], 20, VOCAB_SIZE)
    check_idle(core.scheduler)


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_a_block_can_be_hit_only_once_its_tokens_are_accepted(accuracy: float) -> None:
    core = make_core(num_drafts=6, draft_accuracy=accuracy)
    core.add_request(make_request("a", PROMPT, 40))
    while core.has_work():
        core.step()
        check_scheduler(core.scheduler)
    tokens = PROMPT + expected_tokens(PROMPT, 40, VOCAB_SIZE)
    core.add_request(make_request("b", tokens, 5))
    assert tokens_of(finish(core)["b"]) == expected_tokens(tokens, 5, VOCAB_SIZE)
    assert core.scheduler.stats().prefix_cache_hits == (len(tokens) - 1) // 4 * 4


@pytest.mark.parametrize("draft_model", ["", "small"])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("num_blocks", [110, 180])
def test_blocks_that_a_window_still_sees_are_kept(num_blocks: int, accuracy: float, draft_model: str) -> None:
    drafts = {"num_drafts": 6, "draft_accuracy": accuracy, "draft_model": draft_model}
    settings = {"num_blocks": num_blocks, "caching": False, "max_model_len": 120, **drafts}
    config = make_config(async_scheduling=True, **settings)  # type: ignore[arg-type]
    core = make_core(worker=GroupedHashWorker(config, WINDOWS, 120), **settings)
    for index in range(5):
        core.add_request(make_request(f"r{index}", PROMPT * (index + 1), 60))
    outputs = finish(core)
    for index in range(5):
        assert tokens_of(outputs[f"r{index}"]) == expected_tokens(PROMPT * (index + 1), 60, VOCAB_SIZE)
    assert (core.scheduler.stats().num_preemptions > 0) == (num_blocks == 110)
    check_idle(core.scheduler)


@pytest.mark.parametrize("executor", ["late", "threaded"])
@pytest.mark.parametrize("chunk", [0, 1, 4])
def test_a_failed_step_loses_no_token(chunk: int, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = {"num_drafts": 4, "draft_accuracy": 0.7}
    core = state_core(chunk, 8, executor, **drafts) if chunk else make_core(executor, **drafts)
    core.add_request(make_request("a", PROMPT, 30))
    tokens: list[int] = []
    lose_steps(monkeypatch, every=5)
    num_lost = 0
    for _ in range(200):
        if not core.has_work():
            break
        try:
            tokens += [token_id for output in core.step().outputs for token_id in output.new_token_ids]
        except OSError:
            num_lost += 1
            check_scheduler(core.scheduler)
    assert tokens == expected_tokens(PROMPT, 30, VOCAB_SIZE, state_chunk=chunk)
    assert num_lost
    core.shutdown()


def random_run(seed: int) -> tuple[SpecDecodingStats, int]:
    """Some requests on a core that is too small for them, of which some are aborted. Returns what was counted, and how
    many were preempted."""
    rng = random.Random(seed)
    core = make_core(
        rng.choice(("late", "threaded")),
        num_drafts=rng.choice((1, 3, 6)),
        draft_accuracy=rng.choice((0.0, 0.3, 0.7, 1.0)),
        draft_model=rng.choice(("", "small")),
        num_blocks=rng.choice((14, 20, 64)),
        max_num_seqs=rng.choice((2, 4, 8)),
        budget=rng.choice((9, 20, 64)),
        caching=rng.choice((True, False)),
        max_model_len=50,
    )
    run_random(core, rng, seed)
    return counted(core), core.scheduler.stats().num_preemptions


def run_random(core: EngineCore, rng: random.Random, seed: int, state_chunk: int = 0) -> None:
    """Run nine requests, of which some are aborted, and compare the tokens of the others."""
    expected, received = dict[str, list[int]](), dict[str, list[int]]()
    for index in range(9):
        prompt, max_tokens = [rng.randrange(3)] * rng.randint(1, 12), rng.randint(1, 37)
        expected[f"r{index}"] = expected_tokens(prompt, max_tokens, VOCAB_SIZE, state_chunk=state_chunk)
        received[f"r{index}"] = []
        core.add_request(make_request(f"r{index}", prompt, max_tokens))
    while core.has_work():
        if expected and rng.random() < 0.05:
            leaves = rng.choice(list(expected))
            del expected[leaves]
            core.abort_requests([leaves])
        for output in core.step().outputs:
            received[output.request_id] += output.new_token_ids
        check_scheduler(core.scheduler)
    assert {name: received[name] for name in expected} == expected, f"seed {seed}"
    check_idle(core.scheduler)
    core.shutdown()


def test_random_requests_with_aborts_and_preemptions() -> None:
    runs = [random_run(seed) for seed in range(48)]
    assert sum(stats.num_accepted_tokens for stats, _ in runs) > 500
    assert sum(preempted for _, preempted in runs) > 50


STATE_BYTES = 4096
"""So much that a state is not kept at the end of each block."""


def state_core(
    chunk: int, num_slots: int, executor: str = "late", *, by_default: bool = False, **settings: Any
) -> EngineCore:
    """A core over a model whose layers keep a state. ``by_default``: nobody has asked for overlapping steps."""
    config = make_config(async_scheduling=True, **settings)
    cache = replace(config.cache, state_memory_bytes=num_slots * STATE_BYTES)
    config = replace(config, cache=cache, scheduler=replace(config.scheduler, overlaps_by_default=by_default))
    worker = HashWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256, state_chunk=chunk, state_bytes=STATE_BYTES)
    core = EngineCore(config, EXECUTORS[executor](worker))
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.costs = None
    return core


@pytest.mark.parametrize("chunk", [1, 4])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9, 1.0])
def test_a_request_with_a_state_steps_every_time(accuracy: float, chunk: int, planned: list[SchedulerOutput]) -> None:
    core = state_core(chunk, 8, num_drafts=3, draft_accuracy=accuracy)
    assert core.scheduler.drafts is not None
    assert core.scheduler.drafts.defers
    core.add_request(make_request("a", PROMPT, 60))
    assert tokens_of(finish(core)["a"]) == expected_tokens(PROMPT, 60, VOCAB_SIZE, state_chunk=chunk)
    stats = counted(core)
    assert (stats.num_accepted_tokens > 0) == (accuracy > 0)
    # The last plans may be of steps behind the end, which a step with several right drafts brings nearer.
    assert len(planned) <= 60 - stats.num_accepted_tokens + 2
    check_idle(core.scheduler)


@pytest.mark.parametrize("by_default", [False, True])
@pytest.mark.parametrize("lacks", ["room for drafts", "chunked prefill", "nothing"])
def test_nobody_asked_for_steps_that_are_twice_as_many(lacks: str, by_default: bool) -> None:
    """Where drafts cannot be deferred, a request is computed in every second of overlapping steps."""
    budget, chunked = 20 if lacks == "room for drafts" else 256, lacks != "chunked prefill"
    core = state_core(
        1, 16, budget=budget, chunked=chunked, num_drafts=3, draft_accuracy=0, max_num_seqs=4, by_default=by_default
    )
    for name in "abcd":
        core.add_request(make_request(name, PROMPT, 40))
    for outputs in finish(core).values():
        assert tokens_of(outputs) == expected_tokens(PROMPT, 40, VOCAB_SIZE, state_chunk=1)
    is_deferred, is_alone = lacks == "nothing", by_default and lacks != "nothing"
    assert core.scheduler.drafts is not None
    assert (core.scheduler.drafts.defers, core.scheduler.overlaps) == (is_deferred, not is_alone)
    assert (core.num_steps > 60) == (not is_deferred and not is_alone)
    check_idle(core.scheduler)


def test_an_image_that_no_step_has_room_for_is_refused() -> None:
    """Of 64 tokens a step leaves 32 free, for right drafts beside wrong ones."""
    client = RowClient(state_core(1, 8, num_drafts=4, draft_accuracy=0.5, budget=64, max_num_seqs=8))
    fits = make_media("fits", image(4, 32, is_whole=True), length=60)
    client.add(fits, make_media("large", image(4, 33, is_whole=True), length=60))
    while client.core.has_work():
        client.step()
    assert client.tokens["fits"] == expected(fits, state_chunk=1)
    assert "33 tokens that one step must compute; a step computes 32" in client.ended["large"].error


def random_states_run(seed: int) -> tuple[SpecDecodingStats, int]:
    """As :func:`random_run`, over states."""
    rng = random.Random(seed)
    chunk = rng.choice((1, 4))
    core = state_core(
        chunk,
        rng.choice((3, 6, 16)),
        rng.choice(("late", "threaded")),
        num_drafts=rng.choice((1, 3)),
        draft_accuracy=rng.choice((0.0, 0.3, 0.7, 1.0)),
        num_blocks=rng.choice((20, 64)),
        max_num_seqs=rng.choice((2, 4)),
        budget=rng.choice((32, 64)),
        caching=rng.choice((True, False)),
        max_model_len=50,
    )
    assert core.scheduler.drafts is not None
    assert core.scheduler.drafts.defers
    run_random(core, rng, seed, chunk)
    stats = core.scheduler.stats()
    assert stats.preempted_states.get("computed", 0) == stats.num_preemptions, "no state is kept for them"
    return counted(core), core.scheduler.stats().num_preemptions


def test_random_requests_with_states() -> None:
    runs = [random_states_run(seed) for seed in range(48)]
    assert sum(stats.num_accepted_tokens for stats, _ in runs) > 500
    assert sum(preempted for _, preempted in runs) > 10

from itertools import pairwise

import pytest
from msgspec.structs import replace

from tests.engine_core.executor.late import LateExecutor
from tests.engine_core.helpers import (
    VOCAB_SIZE,
    finish,
    lose_steps,
    make_config,
    make_core,
    make_request,
    make_worker,
    tokens_of,
)
from tests.engine_core.invariants import check_idle, check_scheduler
from tests.engine_core.kv_cache.grouped_hash_worker import WINDOWS, GroupedHashWorker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import ParallelConfig
from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.engine_core.data.messages import EngineCoreRequest, FinishReason
from tokenloom.engine_core.data.scheduler_output import SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens

PROMPT = [1, 2, 3]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[SchedulerOutput]:
    """The steps that workers have executed."""
    executed: list[SchedulerOutput] = []
    execute = HashWorker.execute_model

    def note(self: HashWorker, scheduled: SchedulerOutput) -> None:
        executed.append(scheduled)
        execute(self, scheduled)

    monkeypatch.setattr(HashWorker, "execute_model", note)
    return executed


def run(core: EngineCore, *requests: EngineCoreRequest) -> list[list[int]]:
    for request in requests:
        core.add_request(request)
    outputs = finish(core)
    check_idle(core.scheduler)
    return [tokens_of(outputs[request.request_id]) for request in requests]


@pytest.mark.parametrize("accuracy", [0.0, 0.3, 0.7, 1.0])
def test_tokens_are_those_without_drafts(accuracy: float) -> None:
    core = make_core(num_drafts=6, draft_accuracy=accuracy)
    requests = [make_request(f"r{i}", PROMPT * (i + 1), 50) for i in range(3)]
    assert run(core, *requests) == [expected_tokens(PROMPT * (i + 1), 50, VOCAB_SIZE) for i in range(3)]
    counted = core.scheduler.stats().spec_decoding
    assert counted is not None
    assert counted.num_draft_tokens > 0
    assert sum(counted.num_accepted_tokens_per_pos) == counted.num_accepted_tokens
    assert (counted.num_accepted_tokens > 0) == (accuracy > 0)
    assert (counted.num_accepted_tokens == counted.num_draft_tokens) == (accuracy == 1)


def test_right_drafts_save_steps() -> None:
    core = make_core(num_drafts=6, draft_accuracy=1.0)
    run(core, make_request("a", PROMPT, 1 + 7 * 5))
    assert core.num_steps == 1 + 5


def test_drafts_wait_for_the_next_step_of_their_request(steps: list[SchedulerOutput]) -> None:
    """With pipeline stages a step leaves out requests, of which some have drafts."""
    config = make_config(num_drafts=3, draft_accuracy=1.0, num_blocks=200)
    config = replace(config, parallel=ParallelConfig(pipeline_parallel_size=2))
    core = EngineCore(config, LateExecutor(make_worker(config)))
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.costs = None
    requests = [make_request(f"r{i}", [i, *PROMPT], 1 + 4 * 5) for i in range(5)]
    assert run(core, *requests) == [expected_tokens([i, *PROMPT], 21, VOCAB_SIZE) for i in range(5)]
    assert sum(len(step.num_scheduled_tokens) for step in steps) == 5 * (1 + 5)
    assert len({*steps[-1].num_scheduled_tokens}) < 5
    run(core, make_request("next", PROMPT, 2))
    assert core.scheduler.drafts._proposed.keys() <= {"next"}, "drafts of requests that ended are kept"


def test_a_stop_token_ends_the_output_within_the_tokens_of_a_step() -> None:
    tokens = expected_tokens(PROMPT, 20, VOCAB_SIZE)
    core = make_core(num_drafts=6, draft_accuracy=1.0)
    params = CoreSamplingParams(max_tokens=20, seed=0, stop_token_ids=(tokens[4],), logprobs=2)
    core.add_request(EngineCoreRequest("a", PROMPT, params))
    outputs = finish(core)["a"]
    assert tokens_of(outputs) == tokens[:5]
    assert (outputs[-1].finish_reason, outputs[-1].stop_token_id) == (FinishReason.STOP, tokens[4])
    for output in outputs:
        assert output.new_logprobs is not None
        assert len(output.new_logprobs.sampled) == len(output.new_token_ids)
        assert len(output.new_logprobs.token_ids) == 2 * len(output.new_token_ids)


def test_log_probabilities_are_those_without_drafts() -> None:
    columns = []
    for num_drafts in (0, 4):
        core = make_core(num_drafts=num_drafts)
        params = CoreSamplingParams(max_tokens=30, seed=0, logprobs=3, prompt_logprobs=1)
        core.add_request(EngineCoreRequest("a", PROMPT, params))
        outputs = finish(core)["a"]
        joined = outputs[0].new_logprobs
        assert joined is not None
        for output in outputs[1:]:
            assert output.new_logprobs is not None
            joined.extend(output.new_logprobs)
        columns.append((joined, outputs[0].new_prompt_logprobs))
    assert columns[0] == columns[1]


def test_drafts_end_before_the_limit_of_tokens(steps: list[SchedulerOutput]) -> None:
    for max_tokens in range(1, 12):
        (tokens,) = run(make_core(num_drafts=6, draft_accuracy=1.0), make_request("a", PROMPT, max_tokens))
        assert len(tokens) == max_tokens
    for step in steps:
        computed = step.num_computed_tokens()
        assert all(computed[r] + n < len(PROMPT) + 11 for r, n in step.num_scheduled_tokens.items())


def test_drafts_take_only_the_budget_that_is_left(steps: list[SchedulerOutput]) -> None:
    core = make_core(num_drafts=6, draft_accuracy=1.0, budget=9)
    requests = [make_request(f"r{i}", PROMPT, 30) for i in range(3)] + [make_request("long", PROMPT * 10, 4)]
    expected = [expected_tokens(PROMPT, 30, VOCAB_SIZE)] * 3 + [expected_tokens(PROMPT * 10, 4, VOCAB_SIZE)]
    assert run(core, *requests) == expected
    assert max(step.total_num_scheduled_tokens for step in steps) <= 9
    assert any(step.draft_token_ids for step in steps)


def test_no_step_has_more_rows_than_are_nearly_free(steps: list[SchedulerOutput]) -> None:
    core = make_core(num_drafts=6, draft_accuracy=1.0)
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.free_rows = 8
    run(core, *(make_request(f"r{i}", [i + 1], 8 + 4 * i) for i in range(5)))
    decodes = [step for step in steps if not step.scheduled_new_reqs]
    assert max(step.total_num_scheduled_tokens for step in decodes) <= 8
    assert not any(step.num_drafts_wanted for step in steps if len(step.num_scheduled_tokens) > 4)
    assert any(len(step.draft_token_ids) == 2 for step in decodes)
    for step, following in pairwise(steps):
        assert all(len(drafts) <= step.num_drafts_wanted[r] for r, drafts in following.draft_token_ids.items())


def test_drafts_preempt_no_request() -> None:
    settings = {"num_blocks": 9, "block_size": 4, "max_model_len": 20, "caching": False}
    preemptions = []
    for num_drafts in (0, 6):
        core = make_core(num_drafts=num_drafts, draft_accuracy=1.0, **settings)
        requests = [make_request(f"r{i}", [i + 1] * 3, 14) for i in range(2)]
        assert run(core, *requests) == [expected_tokens([i + 1] * 3, 14, VOCAB_SIZE) for i in range(2)]
        preemptions.append(core.scheduler.stats().num_preemptions)
    assert preemptions == [0, 0]


@pytest.mark.parametrize("accuracy", [0.0, 0.5, 1.0])
def test_a_block_can_be_hit_only_once_its_tokens_are_accepted(accuracy: float) -> None:
    core = make_core(num_drafts=6, draft_accuracy=accuracy)
    core.add_request(make_request("a", PROMPT, 40))
    while core.has_work():
        core.step()
        check_scheduler(core.scheduler)
    tokens = PROMPT + expected_tokens(PROMPT, 40, VOCAB_SIZE)
    (tail,) = run(core, make_request("b", tokens, 5))
    assert tail == expected_tokens(tokens, 5, VOCAB_SIZE)
    assert core.scheduler.stats().prefix_cache_hits == (len(tokens) - 1) // 4 * 4


@pytest.mark.parametrize("draft_model", ["", "small"])
@pytest.mark.parametrize("num_blocks", [110, 150])
def test_blocks_that_a_window_still_sees_are_kept(num_blocks: int, draft_model: str) -> None:
    drafts = {"num_drafts": 6, "draft_accuracy": 0.5, "draft_model": draft_model}
    config = make_config(num_blocks=num_blocks, caching=False, max_model_len=120, **drafts)  # type: ignore[arg-type]
    core = EngineCore(config, UniProcExecutor(GroupedHashWorker(config, WINDOWS, 120)))
    requests = [make_request(f"r{i}", PROMPT * (i + 1), 60) for i in range(5)]
    assert run(core, *requests) == [expected_tokens(PROMPT * (i + 1), 60, VOCAB_SIZE) for i in range(5)]
    assert (core.scheduler.stats().num_preemptions > 0) == (num_blocks == 110)


def test_wrong_drafts_end() -> None:
    core = make_core(num_drafts=4, draft_accuracy=0.0)
    run(core, make_request("a", PROMPT, 33 + 60))
    counted = core.scheduler.stats().spec_decoding
    assert counted is not None
    assert counted.num_drafts == 32


def test_a_failed_step_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_drafts=4, draft_accuracy=0.7)
    core.add_request(make_request("a", PROMPT, 30))
    tokens: list[int] = []
    lose_steps(monkeypatch, every=3)
    for _ in range(100):
        if not core.has_work():
            break
        try:
            tokens += [token_id for output in core.step().outputs for token_id in output.new_token_ids]
        except OSError:
            check_scheduler(core.scheduler)
    assert tokens == expected_tokens(PROMPT, 30, VOCAB_SIZE)


def test_tokens_behind_wrong_drafts_leave_a_prompt_its_whole_chunk() -> None:
    """A prompt of a layer with a state used to wait for as long as many others decoded with wrong drafts."""
    config = make_config(num_blocks=900, budget=33 + 64, max_num_seqs=33, num_drafts=3, draft_accuracy=0.5)
    core = EngineCore(config, UniProcExecutor(HashWorker(config, vocab_size=VOCAB_SIZE, state_chunk=64)))
    assert core.scheduler.drafts is not None
    core.scheduler.drafts.costs = None
    for index in range(32):
        core.add_request(make_request(str(index), [index + 1] * 3, 60))
    for _ in range(12):
        core.step()
    prompt = list(range(1, 81))
    core.add_request(make_request("prompt", prompt, 1))
    outputs = [output for _ in range(4) for output in core.step().outputs if output.request_id == "prompt"]
    assert tokens_of(outputs) == expected_tokens(prompt, 1, VOCAB_SIZE, state_chunk=64)

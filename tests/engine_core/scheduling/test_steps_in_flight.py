"""Tests async scheduling: what overlapping steps must not change, and which tokens they drop."""

from typing import Any

import msgspec
import pytest

from tests.engine_core.executor.late import LateExecutor
from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, make_worker, tokens_of
from tests.engine_core.invariants import check_idle
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.core_params import TranscriptRules
from tokenloom.engine_core.data.messages import EngineCoreOutput, ErrorKind, FinishReason
from tokenloom.engine_core.data.scheduler_output import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker, expected_tokens


class NotingWorker(HashWorker):
    """Records the steps that it computes."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.__dict__.setdefault("scheduled", []).append(dict(scheduler_output.num_scheduled_tokens))
        super().execute_model(scheduler_output)


def make_overlapping_core(**settings: object) -> tuple[EngineCore, NotingWorker]:
    config = make_config(async_scheduling=True, **settings)  # type: ignore[arg-type]
    worker = NotingWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256)
    return EngineCore(config, LateExecutor(worker)), worker


def test_the_next_step_is_scheduled_before_the_token_is_known() -> None:
    core, worker = make_overlapping_core()
    core.add_request(make_request("a", [1, 2, 3], 3))
    assert core.step().outputs == []
    assert core.scheduler.requests["a"].num_output_placeholders == 1
    (first,) = core.step().outputs
    assert first.new_token_ids == expected_tokens([1, 2, 3], 1, VOCAB_SIZE)
    assert core.scheduler.requests["a"].num_output_placeholders == 1
    assert tokens_of([first, *finish(core)["a"]]) == expected_tokens([1, 2, 3], 3, VOCAB_SIZE)
    assert worker.scheduled == [{"a": 3}, {"a": 1}, {"a": 1}], "a limit is known before the tokens are"
    check_idle(core.scheduler)


def test_a_token_drawn_after_a_stop_token_is_dropped() -> None:
    expected = expected_tokens([1, 2, 3], 9, VOCAB_SIZE)
    core, worker = make_overlapping_core()
    core.add_request(make_request("a", [1, 2, 3], 9, stop=(expected[3],)))
    outputs = finish(core)["a"]
    assert tokens_of(outputs) == expected[:4]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert len(worker.scheduled) == 5, "it was in flight when the stop token came"
    check_idle(core.scheduler)


def test_a_token_of_an_ended_request_is_not_given_to_the_next_one_with_its_id() -> None:
    core, _ = make_overlapping_core()
    core.add_request(make_request("a", [1, 2, 3], 9))
    core.step()
    core.step()
    core.abort_requests(["a"])
    core.add_request(make_request("a", [4, 5], 3))
    assert tokens_of(finish(core)["a"]) == expected_tokens([4, 5], 3, VOCAB_SIZE)
    check_idle(core.scheduler)


def test_a_token_of_a_step_in_flight_counts_though_its_request_was_preempted() -> None:
    core, _ = make_overlapping_core(num_blocks=12, block_size=4, max_num_seqs=3)
    prompts = {name: [seed] * 8 for seed, name in enumerate("abc")}
    for name, prompt in prompts.items():
        core.add_request(make_request(name, prompt, 30))
    outputs = finish(core)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == expected_tokens(prompt, 30, VOCAB_SIZE)
        assert [output.token_index for output in outputs[name]] == list(range(30))
    assert core.scheduler.stats().num_preemptions
    check_idle(core.scheduler)


class ChoosyWorker(HashWorker):
    """Draws no token for ``a`` in its third step."""

    num_steps = 0
    reason = "without_choice"

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        self.num_steps += 1
        output = super().sample_tokens(grammar)
        if self.num_steps == 3:
            output.sampled_token_ids[output.req_ids.index("a")] = []
            getattr(output, self.reason).append("a")
        return output


@pytest.mark.parametrize(
    ("params", "field"),
    [({}, "transcript"), ({"allowed_token_ids": tuple(range(VOCAB_SIZE))}, "allowed_token_ids")],
)
def test_a_transcript_without_a_token_that_may_follow_names_its_rules(params: dict[str, Any], field: str) -> None:
    config = make_config()
    core = EngineCore(config, UniProcExecutor(ChoosyWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256)))
    request, rules = make_request("a", [1, 2, 3], 6), TranscriptRules(suppressed_token_ids=(1,))
    sampling = msgspec.structs.replace(request.sampling_params, transcript=rules, **params)
    core.add_request(msgspec.structs.replace(request, sampling_params=sampling))
    last = finish(core)["a"][-1]
    assert (last.finish_reason, last.error_field) == (FinishReason.ERROR, field)
    assert last.error.startswith(f"{field}: ")
    check_idle(core.scheduler)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_without_an_allowed_token_ends_with_the_field_at_fault(overlaps: bool, is_preempted: bool) -> None:
    config = make_config(async_scheduling=overlaps)
    worker = ChoosyWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256)
    core = EngineCore(config, LateExecutor(worker) if overlaps else UniProcExecutor(worker))
    for name in "ab":
        core.add_request(make_request(name, [1, 2, 3], 6))
    outputs: list[EngineCoreOutput] = []
    for step in range(20):
        if is_preempted and step == 3:
            core.reset_prefix_cache(preempt_running=True)
        outputs += core.step().outputs
    *told, last = [output for output in outputs if output.request_id == "a"]
    assert tokens_of(told) == expected_tokens([1, 2, 3], 2, VOCAB_SIZE)
    assert (last.finish_reason, last.error_field) == (FinishReason.ERROR, "allowed_token_ids")
    assert len(tokens_of([output for output in outputs if output.request_id == "b"])) == 6
    check_idle(core.scheduler)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_a_request_whose_logits_are_useless_fails_alone_and_leaves_no_cached_block(
    overlaps: bool, is_preempted: bool
) -> None:
    config = make_config(async_scheduling=overlaps, block_size=4)
    worker = ChoosyWorker(config, vocab_size=VOCAB_SIZE, max_model_len=256)
    worker.reason = "without_finite_logit"
    core = EngineCore(config, LateExecutor(worker) if overlaps else UniProcExecutor(worker))
    prompts = {"a": list(range(10)), "b": list(range(20, 30))}
    for name, prompt in prompts.items():
        core.add_request(make_request(name, prompt, 6))
    outputs: list[EngineCoreOutput] = []
    for step in range(20):
        if is_preempted and step == 3:
            core.reset_prefix_cache(preempt_running=True)
        outputs += core.step().outputs
    *told, last = [output for output in outputs if output.request_id == "a"]
    assert tokens_of(told) == expected_tokens(prompts["a"], 2, VOCAB_SIZE)
    assert (last.finish_reason, last.error_kind, last.error_field) == (
        FinishReason.ERROR,
        ErrorKind.INTERNAL,
        "",
    )
    assert "no finite logit" in last.error
    others = [output for output in outputs if output.request_id == "b"]
    assert tokens_of(others) == expected_tokens(prompts["b"], 6, VOCAB_SIZE)
    for name, num_cached in (("a", 0), ("b", 8)):
        core.add_request(make_request("again", prompts[name], 6))
        again = finish(core)["again"]
        assert tokens_of(again) == expected_tokens(prompts[name], 6, VOCAB_SIZE)
        assert again[0].prefill_stats is not None
        assert again[0].prefill_stats.num_cached_tokens == num_cached
    check_idle(core.scheduler)


@pytest.mark.parametrize("stop", [(), tuple(range(0, VOCAB_SIZE, 7))])
@pytest.mark.parametrize(("num_blocks", "budget"), [(200, 256), (30, 256), (200, 8), (24, 9)])
def test_on_and_off_give_the_same_tokens(num_blocks: int, budget: int, stop: tuple[int, ...]) -> None:
    outputs = []
    for overlaps in (False, True):
        config = make_config(num_blocks=num_blocks, budget=budget, async_scheduling=overlaps)
        core = EngineCore(config, (LateExecutor if overlaps else UniProcExecutor)(make_worker(config)))
        for n in range(40):
            core.add_request(make_request(f"r{n}", [7] * (n % 5 * 4) + list(range(n % 11 + 1)), 5 + n, stop=stop))
        outputs.append({name: (tokens_of(each), each[-1].finish_reason) for name, each in finish(core, 3000).items()})
        check_idle(core.scheduler)
    assert outputs[0] == outputs[1]

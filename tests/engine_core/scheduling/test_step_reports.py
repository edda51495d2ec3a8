import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.engine_core.helpers import VOCAB_SIZE, finish, make_config, make_request, make_worker
from tokenloom.engine_core.core import EngineCore
from tokenloom.engine_core.data.config import ObservabilityConfig
from tokenloom.engine_core.data.messages import EngineCoreOutput, FinishReason, StepSpan
from tokenloom.engine_core.data.scheduler_output import CachedRequestData, ModelRunnerOutput, SchedulerOutput
from tokenloom.engine_core.executor.make_executor import make_executor
from tokenloom.engine_core.executor.uniproc import UniProcExecutor
from tokenloom.engine_core.fake_workers.hash_worker import HashWorker
from tokenloom.engine_core.scheduling import step_reports
from tokenloom.engine_core.scheduling.step_reports import IterationLog, StepBill, StepTraces, as_observer
from tokenloom.process.cpu_bill import OVERHEAD


class FailingWorker(HashWorker):
    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        raise RuntimeError("cannot compute 4242")


def fail_a_step(observability: ObservabilityConfig) -> None:
    config = msgspec.structs.replace(make_config(), observability=observability)
    core = EngineCore(config, UniProcExecutor(FailingWorker(config, vocab_size=VOCAB_SIZE)))
    core.add_request(make_request("a", [61, 62, 63, 64, 65], 7))
    with pytest.raises(RuntimeError):
        core.step()


def test_a_dump_describes_the_failed_step_without_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path)))
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["error"] == "RuntimeError"
    assert dump["num_scheduled_tokens"] == {"a": 5}
    assert dump["requests"]["a"]["num_prompt_tokens"] == 5
    assert len(dump["requests"]["a"]["block_ids"]) == 2
    assert dump["stats"]["num_running"] == 1
    assert "token_ids" not in dump["requests"]["a"]
    assert path.read_text() in caplog.text


def test_a_dump_has_tokens_only_if_configured(tmp_path: Path) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path), dump_tokens=True))
    (path,) = tmp_path.iterdir()
    dump = json.loads(path.read_text())
    assert dump["requests"]["a"]["token_ids"] == [61, 62, 63, 64, 65]
    assert dump["error"] == "RuntimeError: cannot compute 4242"


def test_a_dump_that_cannot_be_written_hides_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fail_a_step(ObservabilityConfig(dump_dir=str(tmp_path / "absent")))
    assert "the dump of a failed step cannot be written" in caplog.text


def test_a_line_reports_the_work_and_duration_of_a_step(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    iterations = IterationLog(iter([1.0, 2.0, 2.5, 4.0]).__next__)
    iterations.begin()
    iterations.begin()
    # a and b decode, c goes on with its prompt, d is back with one token to compute.
    cached = CachedRequestData(["a", "b", "c", "d"], [[], [], [], [3]], [9, 9, 9, 0], {"d": [5]})
    iterations.end(1, SchedulerOutput([], cached, {"a": 1, "b": 1, "c": 7, "d": 1}, 10, [], []))
    iterations.end(2, SchedulerOutput([], CachedRequestData(["a"], [[]], [10], {}), {"a": 1}, 1, [], []))
    first, second = (record.getMessage() for record in caplog.records)
    assert first == (
        "Iteration(1): 2 context requests, 8 context tokens, 2 generation requests, 2 generation tokens, "
        "iteration elapsed time: 1500.00 ms"
    )
    assert "1 generation requests" in second
    assert "2000.00 ms" in second


def test_a_request_that_verifies_drafts_decodes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    iterations = IterationLog(iter([1.0, 2.0]).__next__)
    iterations.begin()
    cached = CachedRequestData(["a", "b"], [[], []], [9, 9], {})
    step = SchedulerOutput([], cached, {"a": 4, "b": 7}, 11, [], [], {"a": [1, 2, 3]})
    iterations.end(1, step)
    (record,) = caplog.records
    assert "1 context requests, 7 context tokens, 1 generation requests, 4 generation tokens" in record.getMessage()


@pytest.mark.parametrize("overlaps", [False, True])
def test_every_step_of_a_core_is_a_line(overlaps: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenloom.engine_core.scheduling.step_reports")
    config = make_config(async_scheduling=overlaps)
    config = msgspec.structs.replace(config, observability=ObservabilityConfig(log_iterations=True))
    core = EngineCore(config, make_executor(config, make_worker))
    core.add_request(make_request("a", [1, 2, 3], 4))
    finish(core)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in lines] == [f"Iteration({n})" for n in range(1, 5)]
    assert "1 context requests, 3 context tokens" in lines[0]
    core.shutdown()


TRACED = ObservabilityConfig(trace_steps=True)


def traced_core(observability: ObservabilityConfig = TRACED, **options: object) -> EngineCore:
    config = msgspec.structs.replace(make_config(**options), observability=observability)
    return EngineCore(config, make_executor(config, make_worker))


def spans_of(core: EngineCore) -> dict[str, list[StepSpan]]:
    """Step until nothing is left."""
    found: dict[str, list[StepSpan]] = {}
    while core.has_work():
        found |= core.step().step_spans
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_steps_of_a_traced_request_are_told_with_its_end(overlaps: bool) -> None:
    core = traced_core(async_scheduling=overlaps, budget=4, max_num_seqs=4)
    core.add_request(msgspec.structs.replace(make_request("a", list(range(10)), 5), is_traced=True))
    core.add_request(make_request("b", [1, 2], 3))
    found = spans_of(core)
    assert found.keys() == {"a"}
    steps = found["a"]
    assert [step.is_prefill for step in steps] == [True] * (len(steps) - 4) + [False] * 4
    assert sum(step.num_tokens for step in steps if step.is_prefill) == 10
    assert {step.num_tokens for step in steps if not step.is_prefill} == {1}
    assert max(step.batch_requests for step in steps) == 2
    assert all(step.batch_tokens >= step.num_tokens for step in steps)
    assert all(step.began_ns - step.schedule_ns <= step.began_ns <= step.ended_ns for step in steps)
    assert [step.ended_ns for step in steps] == sorted(step.ended_ns for step in steps)
    assert any(step.schedule_ns for step in steps)
    core.shutdown()


def test_a_core_that_traces_nothing_makes_no_call_for_it() -> None:
    core = traced_core(ObservabilityConfig())
    assert core._observer is None
    assert core._traces is None
    assert "schedule" not in vars(core.scheduler)
    core.add_request(msgspec.structs.replace(make_request("a", [1, 2, 3], 4), is_traced=True))
    assert spans_of(core) == {}
    core.shutdown()


def test_of_a_long_request_samples_are_kept() -> None:
    core = traced_core(budget=4, max_num_seqs=4)
    core.add_request(msgspec.structs.replace(make_request("a", list(range(8)), 300), is_traced=True))
    steps = spans_of(core)["a"]
    decodes = [step for step in steps if not step.is_prefill]
    assert len(steps) - len(decodes) == 2
    assert 16 <= len(decodes) <= 32
    began = [step.began_ns for step in decodes]
    assert began == sorted(set(began))
    core.shutdown()


def test_what_ends_without_an_output_is_forgotten_and_a_failed_step_leaves_nothing() -> None:
    core = traced_core()
    traces = core._traces
    assert traces is not None
    for name in ("a", "b"):
        core.add_request(msgspec.structs.replace(make_request(name, [1, 2, 3], 4), is_traced=True))
    core.step()
    core.abort_requests(["a"])
    core.add_request(msgspec.structs.replace(make_request("c", [1, 2, 3], 4), is_traced=True))
    assert traces._traced.keys() == {"b", "c"}
    assert spans_of(core).keys() == {"b", "c"}
    traces.begin()
    traces.abandon()
    assert not traces._begun
    assert not traces._traced
    core.shutdown()


def test_lines_and_traces_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tokenloom.engine_core.scheduling.step_reports")
    core = traced_core(ObservabilityConfig(log_iterations=True, trace_steps=True))
    core.add_request(msgspec.structs.replace(make_request("a", [1, 2, 3], 4), is_traced=True))
    assert len(spans_of(core)["a"]) == len(caplog.records) == 4
    assert as_observer(None, None) is None
    traces = StepTraces({})
    assert as_observer(None, traces) is traces
    core.shutdown()


BILLED = ObservabilityConfig(bill=True)
MS = 1_000_000


class Billing:
    """A bill with CPU time and a clock that a test sets."""

    def __init__(self, **tenants: str) -> None:
        self.cpu = self.now = 0
        self.live: dict[str, Any] = dict.fromkeys(tenants)
        self.bill = StepBill(self.live, lambda: self.cpu, lambda: self.now)
        for name, tenant in tenants.items():
            self.bill.add(name, tenant)

    def step(self, milliseconds: int, **tokens: int) -> None:
        """Compute a step in which each request has so many tokens."""
        self.bill.begin()
        self.cpu += milliseconds * MS
        scheduled = SchedulerOutput([], CachedRequestData([], [], [], {}), tokens, sum(tokens.values()), [], [])
        self.bill.end(0, scheduled, ModelRunnerOutput([], []))

    def spent(self, *names: str) -> list[float]:
        """Return the milliseconds of requests."""
        outputs = [EngineCoreOutput(name, [1]) for name in names]
        self.bill.report(outputs)
        return [in_ms(output.cpu_ns) for output in outputs]

    def totals(self) -> dict[str, float]:
        """Return the milliseconds of tenants."""
        self.now += 10**9
        return {tenant: in_ms(nanoseconds) for tenant, nanoseconds in self.bill.report([]).items()}


def in_ms(nanoseconds: int) -> float:
    return round(nanoseconds / MS, 3)


def test_the_requests_of_a_step_pay_for_it_and_nobody_pays_for_the_time_before() -> None:
    billing = Billing(a="x", b="y", c="y")
    billing.cpu = 100 * MS
    assert billing.totals() == {OVERHEAD: 0, "x": 0, "y": 0}
    billing.step(30, a=1, b=1)
    assert billing.spent("a", "b", "c") == [15, 15, 0]
    billing.step(10, c=1)
    assert billing.spent("c") == [10], "totals come every half second only"
    assert billing.totals() == {OVERHEAD: 100, "x": 15, "y": 25}


def test_the_time_between_two_steps_that_do_not_overlap_is_paid_by_requests() -> None:
    billing = Billing(a="x")
    billing.step(10, a=1)
    assert billing.spent("a") == [10]
    billing.cpu += 6 * MS  # its token is handled, and the next step scheduled
    billing.step(10, a=1)
    assert billing.spent("a") == [26]
    assert billing.totals() == {OVERHEAD: 0, "x": 26}


def test_the_time_after_an_abort_is_overhead() -> None:
    billing = Billing(a="x")
    billing.step(10, a=1)
    billing.live.clear()  # aborted: no step says so
    billing.cpu += 30 * MS
    billing.live["b"] = None
    billing.bill.add("b", "y")
    billing.step(5, b=1)
    assert billing.totals() == {OVERHEAD: 30, "x": 10, "y": 5}


def test_what_a_tenant_is_billed_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reports, "MAX_TENANTS", 3)
    monkeypatch.setattr(step_reports, "_MOST_ENDED", 0)
    billing, rng = Billing(), random.Random(1)
    before: dict[str, float] = {}
    for number in range(300):
        name = f"r{number}"
        billing.live[name] = None
        billing.bill.add(name, f"t{rng.randrange(8)}")
        billing.step(1, **dict.fromkeys(billing.live, 1))
        for each in [each for each in billing.live if rng.random() < 0.4]:
            del billing.live[each]
        totals = billing.totals()
        assert all(totals[tenant] >= spent for tenant, spent in before.items())
        before = totals
    assert len(before) == 3 + 2, "and the overhead, and all others together"


def test_what_a_token_and_a_row_cost_is_learned_from_steps_of_one_kind() -> None:
    billing = Billing(a="x", b="y")
    for _ in range(100):
        billing.step(4, a=1)  # a row and its token: 4 ms
        billing.step(100, b=100)  # a token: 1 ms
    before = billing.spent("a", "b")
    billing.step(104, a=1, b=100)  # rows of 3 ms and tokens of 1 ms: 4 and 103
    after = billing.spent("a", "b")
    cost_a, cost_b = after[0] - before[0], after[1] - before[1]
    assert cost_a == pytest.approx(104 / 107 * 4, rel=0.01)
    assert cost_a + cost_b == pytest.approx(104, abs=0.01)


def test_the_results_of_the_last_step_are_paid_by_its_requests() -> None:
    billing = Billing(a="x")
    billing.step(3, a=1)
    billing.cpu += 2 * MS
    billing.live.clear()
    output = EngineCoreOutput("a", [1], finish_reason=FinishReason.LENGTH)
    totals = billing.bill.report([output])
    assert in_ms(totals["x"]) == in_ms(output.cpu_ns) == 5, "no request is left: the totals come at once"
    billing.step(1, a=1)  # in flight when it ended
    assert billing.totals() == {OVERHEAD: 0, "x": 6}


def test_ended_requests_are_forgotten_and_their_tenants_are_not() -> None:
    billing = Billing()
    for number in range(5000):
        name = f"r{number}"
        billing.bill.add(name, "x")
        billing.step(1, **{name: 1})
    assert len(billing.bill._spent) < 1100
    assert billing.totals() == {OVERHEAD: 0, "x": 5000}
    billing.step(7, r0=1)
    assert billing.totals()[OVERHEAD] == 7, "of a request that is forgotten"


def test_nothing_is_lost_in_rounding_and_by_failed_steps() -> None:
    billing, rng = Billing(a="x", b="y", c="z"), random.Random(3)
    for _ in range(300):
        tokens = {name: rng.choice((1, 1, 7, 100)) for name in "abc" if rng.random() < 0.6}
        if tokens:
            billing.step(rng.randrange(9), **tokens)
        billing.cpu += rng.randrange(1000)
        if rng.random() < 0.1:
            billing.bill.begin()
            billing.cpu += 5 * MS
            billing.bill.abandon()
    billing.step(1, a=1)
    billing.live.clear()
    assert billing.cpu - 100 <= sum(billing.bill.report([]).values()) <= billing.cpu


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_core_bills_its_processes(overlaps: bool) -> None:
    core = traced_core(BILLED, async_scheduling=overlaps)
    for name in ("a", "b"):
        core.add_request(msgspec.structs.replace(make_request(name, [1, 2, 3], 6), tenant=name.upper()))
    spent: dict[str, int] = {}
    totals: dict[str, int] = {}
    while core.has_work():
        outputs = core.step()
        spent |= {output.request_id: output.cpu_ns for output in outputs.outputs}
        totals = outputs.cpu_ns or totals
    assert spent.keys() == {"a", "b"}
    assert all(spent.values())
    assert totals["A"] >= spent["a"]
    assert totals["B"] >= spent["b"]
    own = time.process_time_ns()
    assert own * 0.5 <= sum(totals.values()), "the start of this process is overhead"
    core.shutdown()


def test_a_core_without_a_bill_makes_no_call_for_it() -> None:
    core = traced_core(ObservabilityConfig())
    assert core._observer is None
    assert core._bill is None
    core.add_request(make_request("a", [1, 2, 3], 4))
    while core.has_work():
        outputs = core.step()
        assert outputs.cpu_ns == {}
        assert not any(output.cpu_ns for output in outputs.outputs)
    core.shutdown()

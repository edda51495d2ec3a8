"""Statistics of intervals, and the line that vLLM prints."""

import asyncio
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec.structs import replace as changed

from tests.plugin_packages import EXAMPLE_NAME, install, install_example
from tokenloom.engine_core.data.draft_counts import SpecDecodingStats
from tokenloom.engine_core.data.messages import EngineCoreOutput, EngineCoreOutputs, SchedulerStats
from tokenloom.services.engine.records.stat_log import EngineStats, StatIntervals, StatLine, plugged_loggers

IDLE = EngineStats(10.0, 0.0, 0.0, 0, 0, 0, 0.0, 0.0, None, None)
BUSY = replace(IDLE, prompt_throughput=12.34, generation_throughput=5.0, num_running=2, num_waiting=3, kv_usage=0.256)


class Kept:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.all: list[EngineStats] = []

    def log(self, stats: EngineStats) -> None:
        self.all.append(stats)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def intervals(kept: Kept, clock: Clock) -> StatIntervals:
    return StatIntervals([kept], 10.0, clock)


def test_rates_are_of_the_interval_alone(intervals: StatIntervals, kept: Kept, clock: Clock) -> None:
    stats = SchedulerStats(num_prefilled_tokens=100, num_preemptions=3, num_running=2, num_waiting=1, kv_usage=0.5)
    clock.now += 10
    intervals.report(stats, 40)
    clock.now += 5
    intervals.report(changed(stats, num_prefilled_tokens=110, num_preemptions=4), 60)
    first, second = kept.all
    assert (first.prompt_throughput, first.generation_throughput, first.num_preemptions) == (10.0, 4.0, 3)
    assert (second.prompt_throughput, second.generation_throughput, second.num_preemptions) == (2.0, 4.0, 1)
    assert (second.num_running, second.num_waiting, second.kv_usage, second.seconds) == (2, 1, 0.5, 5.0)


def test_hit_rates_are_of_the_last_thousand_requests(intervals: StatIntervals, kept: Kept) -> None:
    for requests, queries, hits in ((10, 100, 0), (600, 1000, 900), (1200, 2000, 1900), (1800, 3000, 2900)):
        intervals.report(
            SchedulerStats(num_prefilled_requests=requests, prefix_cache_queries=queries, prefix_cache_hits=hits), 0
        )
    assert [round(each.prefix_hit_rate, 3) for each in kept.all] == [0.0, 0.9, 1.0, 1.0]
    assert kept.all[-1].external_hit_rate is None
    intervals.report(SchedulerStats(num_prefilled_requests=1800, external_prefix_cache_queries=4), 0)
    assert kept.all[-1].external_hit_rate == 0.0


def test_an_interval_ends_with_the_first_step_after_it(intervals: StatIntervals, kept: Kept, clock: Clock) -> None:
    step = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1, 2])], scheduler_stats=SchedulerStats(num_running=1))
    for seconds in (4, 5, 6, 1):
        clock.now += seconds
        intervals.observe(step)
    (only,) = kept.all
    assert (only.generation_throughput, only.num_running) == (6 / 15, 1)
    intervals.log()
    assert kept.all[-1].generation_throughput == 2.0


def test_time_without_steps_is_no_part_of_the_next_interval(intervals: StatIntervals, kept: Kept, clock: Clock) -> None:
    step = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [1, 2])], scheduler_stats=SchedulerStats(num_running=1))
    assert intervals.seconds_left() is None
    intervals.observe(step)
    clock.now += 4
    assert intervals.seconds_left() == 6.0
    intervals.log_if_due()
    clock.now += 6
    intervals.log_if_due()
    assert intervals.seconds_left() is None
    clock.now += 3600
    intervals.log_if_due()
    intervals.observe(step)
    clock.now += 10
    intervals.log_if_due()
    assert [each.generation_throughput for each in kept.all] == [0.2, 0.2]


def test_drafts_of_an_interval(intervals: StatIntervals, kept: Kept, clock: Clock) -> None:
    clock.now += 10
    intervals.report(SchedulerStats(spec_decoding=SpecDecodingStats(4, 12, 6, [4, 2, 0])), 10)
    clock.now += 10
    intervals.report(SchedulerStats(spec_decoding=SpecDecodingStats(6, 18, 9, [6, 3, 0])), 15)
    intervals.report(SchedulerStats(spec_decoding=SpecDecodingStats(6, 18, 9, [6, 3, 0])), 15)
    drafts = kept.all[1].drafts
    assert drafts is not None
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (2, 6, 3)
    assert drafts.accepted_per_position == [2, 1, 0]
    assert kept.all[2].drafts is None


def test_a_logger_that_fails_harms_no_other(kept: Kept, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, stats: EngineStats) -> None:
            raise ZeroDivisionError

    StatIntervals([Broken(), kept], 10.0).report(SchedulerStats(), 0)
    assert len(kept.all) == 1
    assert "a logger of statistics failed" in caplog.text


async def test_it_reports_at_intervals_until_it_is_cancelled(kept: Kept) -> None:
    twice, reads = asyncio.Event(), itertools.count(1)

    def read() -> tuple[SchedulerStats, int]:
        if next(reads) == 3:
            twice.set()
        return SchedulerStats(num_running=7), 3

    task = asyncio.create_task(StatIntervals([kept], 0.001).run(read))
    await twice.wait()
    task.cancel()
    assert [each.num_running for each in kept.all[:2]] == [7, 7]


def test_the_line_has_the_words_of_vllm(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tokenloom.services.engine.records.stat_log")
    StatLine("0").log(BUSY)
    assert caplog.messages == [
        "Engine 0: Avg prompt throughput: 12.3 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 2 reqs, "
        "Waiting: 3 reqs, GPU KV cache usage: 25.6%, Prefix cache hit rate: 0.0%"
    ]


def test_further_parts_stand_where_there_is_something_to_say(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tokenloom.services.engine.records.stat_log")
    drafts = SpecDecodingStats(2, 6, 3, [2, 1, 0])
    line, clock = StatLine("0"), Clock()
    intervals = StatIntervals([line], 10.0, clock)
    clock.now += 10
    intervals.report(SchedulerStats(num_preemptions=2, spec_decoding=drafts, num_running=1), 5)
    first, second = caplog.messages
    assert "Waiting: 0 reqs, Preemptions: 2, GPU KV" in first
    assert second == (
        "SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 0.30 tokens/s, Drafted throughput: "
        "0.60 tokens/s, Accepted: 3 tokens, Drafted: 6 tokens, Per-position acceptance rate: 1.000, 0.500, 0.000, Avg "
        "Draft acceptance rate: 50.0%"
    )


def test_of_several_idle_intervals_only_the_first_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tokenloom.services.engine.records.stat_log")
    line = StatLine("0")
    for stats in (IDLE, BUSY, IDLE, IDLE, BUSY):
        line.log(stats)
    assert len(caplog.messages) == 3


def test_loggers_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tokenloom_example", raising=False)
    install_example(tmp_path)
    (totals,) = plugged_loggers((EXAMPLE_NAME,))
    for stats in (BUSY, IDLE, BUSY):
        totals.log(stats)
    assert totals.seconds == 20.0  # type: ignore[attr-defined]
    assert plugged_loggers(()) == []
    monkeypatch.delitem(sys.modules, "acme", raising=False)
    source = "class Own:\n    def __init__(self, size): pass\n    def log(self, stats): pass"
    install(tmp_path, "acme", {"tokenloom.stat_loggers": {"own": "acme:Own"}}, source)
    with pytest.raises(ValueError, match=r"the plugin acme:own \(stat_loggers\): TypeError"):
        plugged_loggers(("acme",))
    source = "class Own:\n    def __init__(self): raise SystemExit(3)\n    def log(self, stats): pass"
    install(tmp_path, "leaving", {"tokenloom.stat_loggers": {"own": "leaving:Own"}}, source)
    with pytest.raises(ValueError, match=r"the plugin leaving:own \(stat_loggers\): SystemExit: 3"):
        plugged_loggers(("leaving",))

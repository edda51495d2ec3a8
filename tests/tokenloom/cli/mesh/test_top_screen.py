"""What happened between two samples."""

import math
from dataclasses import replace

import pytest

from tokenloom.cli.mesh.mesh_sample import MeshSample, PartPlacement, PartSample, ScrapedMetrics
from tokenloom.cli.mesh.top_screen import Latency, MeshRates, shown, view
from tokenloom.cli.tables import UNLIMITED, print_tables
from tokenloom.supervisor.state_dir import PartRecord, PartReport

INF = math.inf


def part(service: str, pid: int | None = 1, buckets: dict[float, float] | None = None, **values: float) -> PartSample:
    state = None if pid is None else PartReport(pid, "a", "m", None, "h")
    named = {f"vllm:{name}": value for name, value in values.items() if not name.endswith("process")}
    named |= {f"{name}_cpu_seconds_total": value for name, value in values.items() if name.endswith("process")}
    metrics = ScrapedMetrics(named, {"vllm:time_to_first_token_seconds": buckets or {}})
    return PartSample(PartRecord(service, 0, None, "f"), state, pid is not None, metrics)


def test_rates_are_gains_over_time() -> None:
    before = MeshSample(10.0, [part("gateway", generation_tokens_total=100, request_success_total=1)])
    after = MeshSample(12.0, [part("gateway", generation_tokens_total=150, request_success_total=4)])
    seen = view(before, after)
    assert (seen.interval_seconds, seen.generation_tokens_per_second, seen.requests_per_second) == (2.0, 25.0, 1.5)


def test_an_engine_with_its_core() -> None:
    counts = {"num_requests_running": 3.0, "num_requests_waiting": 1.0, "kv_cache_usage_perc": 0.5}
    cache = {"prefix_cache_hits_total": 3.0, "prefix_cache_queries_total": 4.0}
    old = part("engine", process=1.0, core_process=2.0, generation_tokens_total=0)
    new = part("engine", process=1.5, core_process=3.5, generation_tokens_total=20, **counts, **cache)
    (engine,) = view(MeshSample(0.0, [old]), MeshSample(2.0, [new])).parts
    assert engine.cpu_percent == pytest.approx(100.0)
    assert (engine.running, engine.waiting, engine.kv_usage, engine.prefix_hit_rate) == (3, 1, 0.5, 0.75)
    assert engine.generation_tokens_per_second == 10.0
    assert (engine.prompt_tokens_per_second, engine.memory_bytes) == (None, None)


def lines(seen: MeshRates, width: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_tables(shown(seen, width))
    return capsys.readouterr().out.splitlines()


def test_an_engine_that_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    counts = {"drafts_total": 10.0, "draft_tokens_total": 40.0, "accepted_tokens_total": 24.0}
    engine = part("engine", **{f"spec_decode_num_{name}": count for name, count in counts.items()})
    seen = view(MeshSample(0.0, [engine]), MeshSample(1.0, [engine]))
    assert (seen.parts[0].draft_acceptance_rate, seen.parts[0].tokens_per_draft) == (0.6, 3.4)
    text = "\n".join(lines(seen, UNLIMITED, capsys))
    assert "TOK/STEP" in text
    assert "60 %" in text
    assert "3.4" in text


def test_a_part_that_restarted_counts_from_its_start_and_a_dead_one_not_at_all() -> None:
    before = MeshSample(0.0, [part("gateway", pid=1, generation_tokens_total=100), part("engine", pid=2)])
    after = MeshSample(1.0, [part("gateway", pid=9, generation_tokens_total=30), part("engine", pid=None)])
    seen = view(before, after)
    assert seen.generation_tokens_per_second == 30.0
    assert (seen.parts[1].health, seen.parts[1].pid, seen.parts[1].running) == ("NOT_SERVING", None, None)


def test_latencies_are_those_of_the_interval() -> None:
    before = MeshSample(0.0, [part("gateway", buckets={0.1: 100, 0.2: 100, INF: 100})])
    after = MeshSample(1.0, [part("gateway", buckets={0.1: 100, 0.2: 110, INF: 110})])
    latency = view(before, after).time_to_first_token
    assert latency.p50_ms == pytest.approx(150.0)
    assert latency.p95_ms == pytest.approx(195.0)
    assert view(after, after).time_to_first_token.p50_ms is None


def busy_mesh(rule: str) -> MeshRates:
    """Parts with long names and large numbers."""
    sample = MeshSample(0.0, [part("engine", pid=4194303)])
    engine = replace(
        *view(sample, sample).parts,
        role="prefill",
        cpu_percent=1599.6,
        memory_bytes=123_456_789_000,
        running=1234,
        waiting=12_345,
        kv_usage=1.0,
        prefix_hit_rate=1.0,
        prompt_tokens_per_second=123_456.0,
        generation_tokens_per_second=98_765.0,
        placement=PartPlacement(rule, {"score": 123_456.0, "uncached_tokens": 99_999.0, "expected_seconds": 12.3}),
    )
    other = replace(engine, service="output_processor", health="NOT_SERVING", placement=None, role=None)
    return MeshRates(1.0, 1234.5, 98_765.0, Latency(1234.0, 5678.0), Latency(123.0, 456.0), [engine, other])


@pytest.mark.parametrize("rule", ["score", "cost"])
def test_a_terminal_of_80_columns_has_short_units_and_neither_pids_nor_roles(
    rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = lines(busy_mesh(rule), 80, capsys)
    assert max(map(len, narrow)) <= 80
    heads = next(line for line in narrow if line.startswith("PART")).split()
    assert heads[:9] == ["PART", "UP", "CPU", "MEM", "RUN", "WAIT", "KV", "HITS", "IN/S"] or rule == "cost"
    assert {"PART", "UP", "CPU", "RUN", "WAIT", "KV", "OUT/S"} <= set(heads)
    assert not {"PID", "ROLE"} & set(heads)
    assert next(line for line in narrow if line.startswith("engine-0")).split()[:4] == [
        "engine-0",
        "yes",
        "1600%",
        "123G",
    ]
    assert narrow[-1].split()[1] == "no"
    assert "placement by" in "".join(narrow)


def test_where_there_is_room_everything_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    summary, _, heads, *_ = lines(busy_mesh("cost"), UNLIMITED, capsys)
    assert {"ROLE", "PID", "HEALTH", "PROMPT/S", "SCORE", "AHEAD", "COST"} <= set(heads.split())
    assert "TTFT 1234 / 5678 ms (p50 / p95)" in summary

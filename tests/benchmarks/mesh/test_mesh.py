"""What is made of a run through a mesh; the mesh itself, once."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenloom.bench.load.arrivals import LoadResult
from tokenloom.bench.load.events import Outcome
from tokenloom.bench.mesh.mesh import (
    MeshCase,
    added_ms,
    lag_by_quarter,
    mesh_options,
    run_case,
    steady_rate,
    summarize,
    tables,
    write_plot,
)
from tokenloom.model_files.model_path import DEMO_MODEL

CASE = MeshCase(step_ms=20.0, batch=4, seconds=1.0, output_len=10)


def outcome(start: float, ttft: float = 0.05, gap: float = 0.021, tokens: int = 10) -> Outcome:
    itl = [gap] * (tokens - 1)
    timeline: dict[str, float | str] = {"queued_ms": 10.0, "prefill_ms": 20.0, "decode_ms": 190.0}
    return Outcome(start, "", 4, tokens, ttft, ttft + sum(itl), itl, timeline)


def test_a_case_knows_how_many_requests_fill_its_time() -> None:
    assert MeshCase(step_ms=10.0, batch=64, seconds=10.0, output_len=128).num_prompts == 500
    assert MeshCase(step_ms=10.0, batch=64, seconds=0.1, output_len=128).num_prompts == 128
    assert MeshCase(step_ms=0.0, batch=8, seconds=1.0, output_len=400).num_prompts == 100


def test_requests_may_wait_beside_the_batch() -> None:
    case = replace(CASE, waiting=3)
    assert case.num_streams == 7
    flags = mesh_options(DEMO_MODEL, case).flags["engine"]
    assert flags[flags.index("--max-num-seqs") + 1] == "4"
    assert mesh_options(DEMO_MODEL, case).flags["gateway"] == ("--always-queued", str(case.num_streams))
    assert summarize(case, LoadResult([outcome(0.0)], 2.0), {"gateway": 1e-6}, {"gateway": 80.0})["waiting"] == 3


def test_the_engine_never_lacks_room() -> None:
    flags = mesh_options(DEMO_MODEL, CASE).flags["engine"]
    options = dict(zip(flags[::2], flags[1::2], strict=True))
    assert options["--worker"] == "timed"
    assert float(options["--hash-step-seconds"]) == 0.02
    assert int(options["--max-num-seqs"]) == CASE.batch
    assert int(options["--num-kv-blocks"]) * 16 > CASE.batch * (CASE.input_len + CASE.output_len)


def test_what_the_engine_took_is_not_the_meshs() -> None:
    added = added_ms(CASE, [outcome(0.0)])
    assert added["added_ttft_ms"] == [pytest.approx(20.0)]
    assert added["added_itl_ms"] == [pytest.approx(1.0)] * 9
    assert added["lag_ms"] == [pytest.approx(239.0 - 220.0)]


def test_a_lag_that_grows_shows_in_the_quarters() -> None:
    outcomes = [outcome(float(i), ttft=0.05 + 0.01 * (i // 2)) for i in range(8)]
    first, *_, last = lag_by_quarter([*reversed(outcomes), Outcome(0.0, error="HTTP 503")])
    assert last - first == pytest.approx(30.0)
    assert lag_by_quarter(outcomes[:1]) == [first]


def test_an_engine_may_overlap_its_steps() -> None:
    assert "--async-scheduling" in mesh_options(DEMO_MODEL, replace(CASE, async_scheduling=True)).flags["engine"]
    assert "--async-scheduling" not in mesh_options(DEMO_MODEL, CASE).flags["engine"]


def test_prefill_and_decode_engines_may_share_the_work() -> None:
    options = mesh_options(DEMO_MODEL, replace(CASE, prefill=1, decode=2))
    assert options.engine_roles == ["prefill", "decode", "decode"]
    assert options.flags["coordinator"] == ("--pd-threshold", "0"), "short prompts are split too"
    assert mesh_options(DEMO_MODEL, CASE).engine_roles == ["both"]


def test_a_steady_rate_leaves_ramp_and_end_out() -> None:
    # Two at a time, each 1 s after the other's start: 10 tokens a second each once both run.
    outcomes = [outcome(start, ttft=0.1, gap=0.1, tokens=10) for start in (0.0, 0.0, 1.0, 1.0, 2.0, 2.0)]
    assert steady_rate(outcomes) == pytest.approx(20.0, rel=0.15)
    assert steady_rate([outcome(0.0)]) == steady_rate([]) == 0.0


def test_the_summary_counts_cpu_by_token() -> None:
    result = LoadResult([outcome(0.0), outcome(0.0), Outcome(0.0, error="HTTP 503")], 2.0)
    report = summarize(CASE, result, {"gateway": 20e-6, "engine core": 60e-6}, {"gateway": 80.0, "engine core": 90.0})
    assert report["cpu_us_per_token"] == {"gateway": 1.0, "engine core": 3.0, "all": 4.0}
    assert (report["output_tokens"], report["output_throughput"], report["failed"]) == (20, 10.0, 1)
    assert report["ideal_throughput"] == 200.0
    assert report["errors"] == ["HTTP 503"]
    assert [table.row_count for table in tables([report])] == [1, 1, 1]


def test_the_plot_has_a_bar_for_each_run_with_the_parts_of_its_cost(tmp_path: Path) -> None:
    result = LoadResult([outcome(0.0), outcome(0.0)], 2.0)
    reports = [
        summarize(case, result, {"output_processor": 20e-6, "engine core": 60e-6}, {})
        for case in (CASE, replace(CASE, step_ms=0.0, batch=8))
    ]
    write_plot(tmp_path / "cost.svg", reports)
    text = (tmp_path / "cost.svg").read_text()
    assert text.count('class="bar ') == 4
    assert "20 ms, 4: output processor 1, engine core 3 µs. no wait, 8: output processor 1, engine core 3 µs" in text


def test_failures_only_still_make_a_table() -> None:
    report = summarize(CASE, LoadResult([Outcome(0.0, error="x")], 1.0), {"gateway": 1.0}, {"gateway": 80.0})
    assert [table.row_count for table in tables([report])] == [1, 1, 1]


async def test_a_mesh_of_processes_streams_every_token(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    ended: list[Any] = []
    case = MeshCase(step_ms=2.0, batch=4, seconds=0.1, input_len=8, output_len=12)
    report = await run_case(DEMO_MODEL, case, lambda count: ended.append)
    assert report["failed"] == 0
    assert len(ended) == case.num_prompts
    assert report["output_tokens"] == sum(outcome.output_tokens for outcome in ended)
    assert set(report["cpu_us_per_token"]) == {
        "gateway",
        "tokenizer",
        "output_processor",
        "coordinator",
        "engine front",
        "engine core",
        "all",
    }
    assert min(report["cpu_us_per_token"].values()) >= 0.0

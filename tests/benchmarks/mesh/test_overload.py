"""What is made of a run under overload; the run itself, once and short."""

from pathlib import Path

import pytest

from tokenloom.bench.load.open_loop import Shot, Volley
from tokenloom.bench.mesh.overload import mesh_options, run_case
from tokenloom.bench.mesh.overload_case import OverloadCase, Phase, Phases
from tokenloom.bench.mesh.overload_report import (
    goodput,
    memory_growth,
    recovery_seconds,
    summarize,
    tables,
    verdicts,
)
from tokenloom.model_files.model_path import DEMO_MODEL

CASE = OverloadCase(seconds=60.0)


def answered(sent_at: float, ttft: float = 0.1, seconds: float = 1.0) -> Shot:
    return Shot(sent_at, 0.0, 64, 200, sent_at + ttft, sent_at + seconds, complete=True)


def refused(sent_at: float, seconds: float = 0.002) -> Shot:
    return Shot(sent_at, 0.0, 64, 503, sent_at + seconds, sent_at + seconds, retry_after=2)


def phase(name: str, begun_at: float, seconds: float, shots: list[Shot]) -> Phase:
    resident = [(at, {"gateway": 60.0 + at / 100}) for at in (0.0, seconds / 2, seconds)]
    volley = Volley(begun_at, shots, ended_at=begun_at + seconds)
    return Phase(name, 10.0, volley, {"gateway": 0.1}, 0.05, resident)


def phases(overload: list[Shot], recovery: list[Shot], missing: tuple[str, ...] = ()) -> Phases:
    peak = phase("peak", 0.0, 60.0, [answered(at) for at in range(60)])
    return Phases(peak, phase("10x", 100.0, 60.0, overload), phase("recovery", 160.0, 15.0, recovery), list(missing))


def test_the_peak_follows_from_the_batch() -> None:
    assert OverloadCase(batch=64, output_len=64, step_ms=20.0).peak_rate == pytest.approx(50.0)
    flags = mesh_options(DEMO_MODEL, CASE).flags
    assert flags["gateway"] == ("--max-queue-seconds", "0.5")
    assert flags["engine"][:2] == ("--worker", "timed")


def test_goodput_counts_complete_answers_within_the_phase() -> None:
    shots = [answered(at) for at in range(60)] + [refused(at) for at in range(60)]
    assert goodput(Volley(0.0, shots, ended_at=60.0)) == pytest.approx(64.0, rel=0.05)
    assert goodput(Volley(0.0)) == 0.0


def test_memory_is_compared_after_it_has_settled() -> None:
    assert memory_growth(phase("10x", 0.0, 60.0, [])) == {"gateway": pytest.approx(0.3)}


def test_recovery_lasts_until_the_last_bad_request() -> None:
    good = [answered(160.0 + at) for at in range(15)]
    assert recovery_seconds(phases([], good), 0.2) == 0.0
    assert recovery_seconds(phases([], [*good, refused(163.0)]), 0.2) == 3.0
    assert recovery_seconds(phases([], [*good, answered(164.5, ttft=0.3)]), 0.2) == 4.5


def test_the_verdicts_name_what_was_missed() -> None:
    overload = [answered(100.0 + at, ttft=0.15) for at in range(60)] + [refused(100.0 + at) for at in range(60)]
    report = summarize(CASE, phases(overload, [])) | {"restarted": [], "missing": []}
    assert all(is_met for *_, is_met in verdicts(report))
    assert len(tables(report)) == 4
    slow = [answered(100.0 + at * 2, ttft=0.5) for at in range(30)] + [refused(100.0 + at, 0.2) for at in range(60)]
    slow.append(Shot(150.0, 0.0, 64))
    report = summarize(CASE, phases(slow, [refused(170.0)])) | {"restarted": ["engine-0"], "missing": ["engine"]}
    met = {what: is_met for what, _, _, is_met in verdicts(report)}
    assert met.pop("memory after 30 s")
    assert not any(met.values())


async def test_a_mesh_sheds_what_it_cannot_answer(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    case = OverloadCase(
        seconds=3.0, times=8.0, peak_seconds=1.5, recovery_seconds=1.0, step_ms=5.0, batch=8, output_len=64
    )
    names: list[str] = []
    report = await run_case(DEMO_MODEL, case, names.append)
    assert names == ["warm-up", "peak", "8x", "recovery"]
    peak, overload, _ = report["phases"]
    assert overload["refused"] > overload["admitted"] > 0
    assert peak["failed"] == overload["failed"] == overload["unsent"] == 0
    assert overload["retry_after"][0] >= 1
    assert report["restarted"] == report["missing"] == []

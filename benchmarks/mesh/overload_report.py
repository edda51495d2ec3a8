"""Makes the figures, the tables and the verdicts of ``bench overload``."""

import time
from collections.abc import Sequence
from typing import Any, TypeAlias

from rich.table import Table

from ..load.open_loop import Shot, Volley
from ..report.stats import percentile
from .overload_case import OverloadCase, Phase, Phases

Verdict: TypeAlias = tuple[str, str, str, bool]
"""A name, the measured value, the goal, and whether it was met."""


def summarize(case: OverloadCase, phases: Phases) -> dict[str, Any]:
    """Return the figures of a run; times in ms, memory in MiB."""
    peak, overload = (_figures(phase) for phase in (phases.peak, phases.overload))
    return {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "seconds": case.seconds,
        "times": case.times,
        "hogs": case.hogs,
        "max_queue_seconds": case.max_queue_seconds,
        "ideal_tokens_per_second": round(case.peak_rate * case.output_len, 1),
        "phases": [peak, overload, _figures(phases.recovery)],
        "goodput_percent": round(100 * overload["goodput"] / peak["goodput"], 1) if peak["goodput"] else 0.0,
        "ttft_times": _ratio(overload["ttft_p99_ms"], peak["ttft_p99_ms"]),
        "memory_growth_mib": memory_growth(phases.overload),
        "recovery_seconds": recovery_seconds(phases, peak["ttft_p99_ms"] / 1e3),
    }


def _figures(phase: Phase) -> dict[str, Any]:
    volley = phase.volley
    refused = [shot.ended_at - shot.sent_at for shot in volley.shots if shot.refused]
    first = [shot.first_at - shot.sent_at for shot in volley.shots if shot.complete]
    return {
        "phase": phase.name,
        "requests_per_second": round(phase.rate, 1),
        "sent": len(volley.shots),
        "admitted": len(first),
        "refused": len(refused),
        "failed": sum(shot.failed for shot in volley.shots),
        "unsent": volley.num_unsent,
        "goodput": round(goodput(volley), 1),
        "ttft_p50_ms": _ms(first, 50),
        "ttft_p99_ms": _ms(first, 99),
        "refusal_p50_ms": _ms(refused, 50),
        "refusal_p99_ms": _ms(refused, 99),
        "send_lag_p99_ms": _ms([shot.lag for shot in volley.shots], 99),
        "retry_after": [
            min((s.retry_after for s in volley.shots if s.refused), default=0),
            max((s.retry_after for s in volley.shots if s.refused), default=0),
        ],
        "cores": {name: round(cores, 3) for name, cores in phase.cpu.items()},
        "client_cores": round(phase.client_cores, 3),
        "resident_mib": [(round(at, 1), sizes) for at, sizes in phase.resident],
    }


def goodput(volley: Volley) -> float:
    """Return the tokens per second of requests that were answered in full. The first sixth is left out: the answers of
    a phase end later than its requests begin."""
    begin = volley.begun_at + (volley.ended_at - volley.begun_at) / 6
    if volley.ended_at <= begin:
        return 0.0
    done = (shot.tokens for shot in volley.shots if shot.complete and begin < shot.ended_at <= volley.ended_at)
    return sum(done) / (volley.ended_at - begin)


def memory_growth(phase: Phase, settle_seconds: float = 30.0) -> dict[str, float]:
    """Return by how much each service grew after its first 30 s of the overload, or after half of a shorter one."""
    samples = phase.resident
    begin = min(settle_seconds, samples[-1][0] / 2)
    settled = next(sizes for at, sizes in samples if at >= begin)
    return {name: round(size - settled[name], 1) for name, size in samples[-1][1].items()}


def recovery_seconds(phases: Phases, usual_ttft: float) -> float:
    """Return how long after the overload the last request was sent that was refused, failed, or whose first token took
    longer than usual at the peak; 0 if none was."""
    volley = phases.recovery.volley
    slow = [shot.sent_at for shot in volley.shots if _is_slow(shot, usual_ttft)]
    return round(max(max(slow, default=0.0) - phases.overload.volley.ended_at, 0.0), 2) if slow else 0.0


def _is_slow(shot: Shot, usual_ttft: float) -> bool:
    return not shot.complete or shot.first_at - shot.sent_at > usual_ttft


def _ms(seconds: Sequence[float], percent: float) -> float:
    return round(percentile(seconds, percent) * 1e3, 1) if seconds else 0.0


def _ratio(value: float, unit: float) -> float:
    return round(value / unit, 2) if unit else 0.0


def tables(report: dict[str, Any]) -> list[Table]:
    """Make the tables of a report: requests by phase, CPU and memory by service, and the verdicts."""
    return [_requests(report), _cores(report), _memory(report), verdict_table(verdicts(report))]


def _requests(report: dict[str, Any]) -> Table:
    table = Table(title="Requests by phase (times in ms)", title_justify="left", title_style="bold")
    columns = ("phase", "requests/s", "admitted", "refused", "failed", "goodput, tokens/s")
    for column in (*columns, "TTFT p50 / p99", "refusal p50 / p99", "sent late p99"):
        table.add_column(column, justify="right")
    for phase in report["phases"]:
        table.add_row(
            phase["phase"],
            f"{phase['requests_per_second']:g}",
            *(f"{phase[name]:,}" for name in ("admitted", "refused", "failed")),
            f"{phase['goodput']:,.0f}",
            f"{phase['ttft_p50_ms']:,.0f} / {phase['ttft_p99_ms']:,.0f}",
            f"{phase['refusal_p50_ms']:.1f} / {phase['refusal_p99_ms']:.1f}",
            f"{phase['send_lag_p99_ms']:.1f}",
        )
    return table


def _cores(report: dict[str, Any]) -> Table:
    table = Table(title="CPU, cores", title_justify="left", title_style="bold")
    services = list(report["phases"][0]["cores"])
    for column in ("phase", *services, "client"):
        table.add_column(column.replace("_", " "), justify="right")
    for phase in report["phases"]:
        cells = [f"{phase['cores'].get(name, 0.0):.2f}" for name in services]
        table.add_row(phase["phase"], *cells, f"{phase['client_cores']:.2f}")
    return table


def _memory(report: dict[str, Any]) -> Table:
    table = Table(title="Resident memory during the overload, MiB", title_justify="left", title_style="bold")
    samples = report["phases"][1]["resident_mib"]
    services = list(samples[0][1])
    for column in ("after", *services):
        table.add_column(column.replace("_", " "), justify="right")
    stride = max(len(samples) // 8, 1)
    for at, sizes in [*samples[:-1:stride], samples[-1]]:
        table.add_row(f"{at:.0f} s", *(f"{sizes[name]:.0f}" for name in services))
    return table


def verdict_table(verdicts: Sequence[Verdict]) -> Table:
    """Make the table of what was to be shown."""
    table = Table(title="Verdicts", title_justify="left", title_style="bold")
    for column in ("what", "measured", "goal", "met"):
        table.add_column(column)
    for what, measured, goal, is_met in verdicts:
        table.add_row(what, measured, goal, "yes" if is_met else "no")
    return table


def verdicts(report: dict[str, Any]) -> list[Verdict]:
    """Return what was to be shown."""
    over = report["phases"][1]
    limit = 500 if report["hogs"] else 50
    growth = max(report["memory_growth_mib"].values())
    bad = report["restarted"] + report["missing"]
    return [
        ("goodput", f"{report['goodput_percent']:g} % of the peak's", ">= 90 %", report["goodput_percent"] >= 90),
        ("refusals, p99", f"{over['refusal_p99_ms']:g} ms", f"< {limit} ms", over["refusal_p99_ms"] < limit),
        (
            "TTFT of admitted, p99",
            f"{report['ttft_times']:g} times the peak's",
            "<= 2 times",
            report["ttft_times"] <= 2,
        ),
        ("failed requests", str(over["failed"] + over["unsent"]), "0", not over["failed"] + over["unsent"]),
        ("memory after 30 s", f"+{growth:g} MiB", "< 8 MiB", growth < 8),
        ("recovery", f"{report['recovery_seconds']:g} s", "<= 5 s", report["recovery_seconds"] <= 5),
        ("parts restarted or missing", ", ".join(bad) or "none", "none", not bad),
    ]

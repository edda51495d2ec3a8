"""Summarizes a serving run under the names of `vllm bench serve`."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table

from ..load.arrivals import LoadResult
from ..load.events import Outcome
from ..load.slo import Objectives
from ..report.stats import Distribution

LATENCIES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_ms": "inter-token latency",
    "e2el_ms": "end-to-end latency",
}
"""The measures in milliseconds, with their titles."""


def latencies_ms(outcomes: Iterable[Outcome]) -> dict[str, list[float]]:
    """Return the values of each of `LATENCIES` for successful requests."""
    good = [outcome for outcome in outcomes if not outcome.error]
    return {
        "ttft_ms": [outcome.ttft * 1e3 for outcome in good],
        "tpot_ms": [outcome.tpot * 1e3 for outcome in good if outcome.tpot is not None],
        "itl_ms": [seconds * 1e3 for outcome in good for seconds in outcome.itl],
        "e2el_ms": [outcome.latency * 1e3 for outcome in good],
    }


def summarize(result: LoadResult, objectives: Objectives, percents: Sequence[float] = (99,)) -> dict[str, Any]:
    """Return counts, rates per second and latencies; for a mixed load also those of each kind."""
    report = _summary(result.outcomes, result.seconds, objectives, percents)
    kinds = sorted({outcome.kind for outcome in result.outcomes if outcome.kind})
    if kinds:
        report["kinds"] = {
            kind: _summary([o for o in result.outcomes if o.kind == kind], result.seconds, objectives, percents)
            for kind in kinds
        }
    return report


def _summary(
    outcomes: Sequence[Outcome], seconds: float, objectives: Objectives, percents: Sequence[float]
) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if not outcome.error]
    num_input, num_output = (sum(getattr(o, name) for o in good) for name in ("input_tokens", "output_tokens"))
    report: dict[str, Any] = {
        "duration": round(seconds, 4),
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "refused": sum(outcome.refused for outcome in outcomes),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": round(len(good) / seconds, 4),
        "output_throughput": round(num_output / seconds, 3),
        "total_token_throughput": round((num_input + num_output) / seconds, 3),
    }
    if objectives.bounds:
        met = sum(map(objectives.met_by, good))
        report["request_goodput"] = round(met / seconds, 4)
        report["goodput_share"] = round(met / len(outcomes), 4) if outcomes else 0.0
    for name, values in latencies_ms(good).items():
        report |= Distribution.of(values, percents).fields(name)
    if errors := sorted({outcome.error for outcome in outcomes if outcome.error}):
        report["errors"] = errors[:5]
    return report


def table(report: dict[str, Any], title: str) -> Table:
    """Show latencies in rows, and counts and rates in the caption."""
    rows = {"": report, **report.get("kinds", {})}
    percents = [key.removesuffix("_ttft_ms") for key in report if key.startswith("p") and key.endswith("_ttft_ms")]
    shown = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    shown.add_column("ms")
    for column in ("mean", "median", *percents):
        shown.add_column(column, justify="right")
    for kind, part in rows.items():
        shown.add_section()
        for name, text in LATENCIES.items():
            cells = [part.get(f"{column}_{name}") for column in ("mean", "median", *percents)]
            shown.add_row(f"{kind} {text}".strip(), *("-" if cell is None else f"{cell:,.2f}" for cell in cells))
    shown.caption = _caption(report)
    return shown


def _caption(report: dict[str, Any]) -> str:
    lines = [
        f"{report['completed']} requests in {report['duration']:.2f} s, {report['failed']} failed",
        f"{report['request_throughput']:.2f} requests/s, {report['output_throughput']:,.1f} output tokens/s, "
        f"{report['total_token_throughput']:,.1f} tokens/s in all",
    ]
    if "request_goodput" in report:
        lines.append(f"goodput {report['request_goodput']:.2f} requests/s, {report['goodput_share']:.1%} of all")
    if report["refused"]:
        lines.append(f"{report['refused']} of the failed requests were refused (HTTP 503 or 429)")
    lines += [f"error: {error}" for error in report.get("errors", ())]
    return "\n".join(lines)

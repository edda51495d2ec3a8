"""Runs ``bench scale``: the coordinator with 10, 100 and 1,000 fake engines, against the limits of its design."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import uvloop
from rich.table import Table

from ..report import machine
from .offered_picks import StreamResult
from .picks import IndexMemory, PickCost, index_memory, pick_cost
from .registry_case import RegistryCase, RegistryResult, run_registry

ENGINES = (10, 100, 1000)
FOLLOWERS_PER_ENGINE = 0.2
"""Output processors and gateways for each engine, of the largest mesh."""
FULL_REPORTS_PER_SECOND = 5000


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure that must not be exceeded with a thousand engines."""

    figure: str
    most: float


LIMITS = (
    Limit("pick_microseconds", 50.0),
    Limit("hashed_pick_microseconds", 150.0),
    Limit("index_mebibytes", 512.0),
    Limit("cores_at_full_rate", 1.0),
    Limit("megabytes_per_second", 20.0),
    Limit("follower_share", 0.01),
    Limit("mebibytes", 512.0),
    Limit("dead", 0),
    Limit("picks_p99", 25.0),
    Limit("picks_here_p99", 10.0),
    Limit("picks_share_p99", 25.0),
    Limit("picks_share_here_p99", 10.0),
    Limit("picks_cores_at_full_rate", 1.0),
    Limit("hashed_picks_p99", 25.0),
    Limit("hashed_picks_here_p99", 10.0),
    Limit("hashed_picks_share_p99", 25.0),
    Limit("hashed_picks_share_here_p99", 10.0),
    Limit("hashed_picks_cores_at_full_rate", 1.0),
    Limit("join_seconds", 5.0),
    Limit("refused", 0),
)


def run(engines: Sequence[int], seconds: float, done: Callable[[], None]) -> dict[str, Any]:
    """Measure each number of engines; ``done`` is called after each."""
    cases = []
    for count in engines:
        followers = max(2, round(count * FOLLOWERS_PER_ENGINE))
        cost, memory = pick_cost(count), index_memory(count)
        result = uvloop.run(run_registry(RegistryCase(count, followers, seconds)))
        figures = figures_of(result, cost, memory)
        cases.append({**figures, "exceeded": exceeded(figures)})
        done()
    return {"machine": machine.describe(), "cases": cases}


def figures_of(result: RegistryResult, cost: PickCost, memory: IndexMemory) -> dict[str, Any]:
    """Return what is printed of a result."""
    return {
        **asdict(result),
        "cores_at_full_rate": cores_at_full_rate(result),
        "pick_microseconds": cost.without_hashes,
        "hashed_pick_microseconds": cost.with_hashes,
        "index_mebibytes": memory.full,
        **_figures_of_picks("", result.picks[0]),
        **_figures_of_picks("hashed_", result.picks[1]),
    }


def _figures_of_picks(kind: str, picks: StreamResult) -> dict[str, float]:
    return {
        f"{kind}picks_per_second": picks.answered_per_second,
        f"{kind}picks_p99": picks.p99_milliseconds,
        f"{kind}picks_here_p99": picks.here_p99_milliseconds,
        f"{kind}picks_share_p99": picks.share_p99_milliseconds,
        f"{kind}picks_share_here_p99": picks.share_here_p99_milliseconds,
        f"{kind}picks_wait_share": picks.wait_share,
        f"{kind}most_picks_per_second": picks.most_per_second,
        f"{kind}picks_cores": picks.cores,
        f"{kind}picks_loop_cores": picks.loop_cores,
        f"{kind}picks_cores_at_full_rate": picks.cores * picks.asked_per_second / max(picks.answered_per_second, 1.0),
    }


def cores_at_full_rate(result: RegistryResult) -> float:
    """Return the cores that the coordinator would use if the fake engines got all the processor time they need.

    Every report is taken to cost what it cost on average, other work included: more than it does, because snapshots do
    not become more.
    """
    full = min(FULL_REPORTS_PER_SECOND, max(result.reports_per_second, result.engines * 5))
    return result.cores * max(1.0, full / max(result.reports_per_second, 1.0))


def exceeded(figures: dict[str, Any]) -> list[str]:
    """Return which limits do not hold."""
    return [limit.figure for limit in LIMITS if figures[limit.figure] > limit.most]


_ROWS = (
    ("engines", "engines", "{:,.0f}"),
    ("output processors that follow", "followers", "{:,.0f}"),
    ("a pick in the registry, µs", "pick_microseconds", "{:.0f}"),
    ("the same with 256 hashes, µs", "hashed_pick_microseconds", "{:.0f}"),
    ("registry with full caches, MiB", "index_mebibytes", "{:,.0f}"),
    ("reports a second", "reports_per_second", "{:,.0f}"),
    ("coordinator, cores", "cores", "{:.2f}"),
    ("of these, its event loop", "loop_cores", "{:.2f}"),
    ("coordinator at the full rate of reports, cores", "cores_at_full_rate", "{:.2f}"),
    ("coordinator, MiB", "mebibytes", "{:,.0f}"),
    ("snapshots to all, MB a second", "megabytes_per_second", "{:.1f}"),
    ("one follower, share of a core", "follower_share", "{:.2%}"),
    ("engines shown as dead", "dead", "{:.0f}"),
    ("picks a second through PickStream, 10,000 asked", "picks_per_second", "{:,.0f}"),
    ("their latency from due to read, p99, ms", "picks_p99", "{:.1f}"),
    ("of it, in the coordinator, p99, ms", "picks_here_p99", "{:.1f}"),
    ("its event loop waited for a core", "picks_wait_share", "{:.0%}"),
    ("coordinator meanwhile, cores", "picks_cores", "{:.2f}"),
    ("of these, its event loop", "picks_loop_cores", "{:.2f}"),
    ("coordinator at the full rate of picks, cores", "picks_cores_at_full_rate", "{:.2f}"),
    ("picks a second if more are asked", "most_picks_per_second", "{:,.0f}"),
    ("p99 from due to read at 60 % of that, ms", "picks_share_p99", "{:.1f}"),
    ("of it, in the coordinator, p99, ms", "picks_share_here_p99", "{:.1f}"),
    ("picks with 256 hashes a second, 5,000 asked", "hashed_picks_per_second", "{:,.0f}"),
    ("their latency from due to read, p99, ms", "hashed_picks_p99", "{:.1f}"),
    ("of it, in the coordinator, p99, ms", "hashed_picks_here_p99", "{:.1f}"),
    ("its event loop waited for a core", "hashed_picks_wait_share", "{:.0%}"),
    ("coordinator meanwhile, cores", "hashed_picks_cores", "{:.2f}"),
    ("of these, its event loop", "hashed_picks_loop_cores", "{:.2f}"),
    ("coordinator at the full rate of these picks, cores", "hashed_picks_cores_at_full_rate", "{:.2f}"),
    ("picks with 256 hashes a second if more are asked", "hashed_most_picks_per_second", "{:,.0f}"),
    ("p99 from due to read at 60 % of that, ms", "hashed_picks_share_p99", "{:.1f}"),
    ("of it, in the coordinator, p99, ms", "hashed_picks_share_here_p99", "{:.1f}"),
    ("rejoin after SIGKILL, seconds", "join_seconds", "{:.1f}"),
    ("rejoin, processor seconds", "rejoin_cpu_seconds", "{:.1f}"),
    ("requests refused meanwhile", "refused", "{:.0f}"),
    ("requests placed meanwhile", "asked", "{:,.0f}"),
)


def table(report: dict[str, Any]) -> Table:
    """Return a column for each number of engines, and the limits."""
    limits = {limit.figure: limit.most for limit in LIMITS}
    shown = Table(title="Coordinator")
    shown.add_column("")
    for _ in report["cases"]:
        shown.add_column(justify="right")
    shown.add_column("at most", justify="right")
    for title, figure, form in _ROWS:
        most = form.format(limits[figure]) if figure in limits else ""
        shown.add_row(title, *(form.format(case[figure]) for case in report["cases"]), most)
    return shown

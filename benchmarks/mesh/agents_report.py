"""Summarizes replayed sessions of agents: what was computed anew, what a first token took, what was cached by turn."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from ..load.agent_sessions import AgentClient
from ..load.events import Outcome
from ..report.stats import percentile

_BLOCK = 16
_UNNAMED = "not named"
_BINS = ((2, 2), (3, 5), (6, 10), (11, 20), (21, 50), (51, 100))
"""The turns of a main line that are shown together."""


@dataclass
class TurnRecord:
    """Holds what happened to one request.

    Attributes:
        number: Its place in its line, from 1.
        past: The request of the session with whose prompt this one's begins; None: there is none.
        dropped: Tokens at the end of that prompt that this one does not have.
    """

    client: AgentClient
    number: int
    is_sub_agent: bool = False
    is_branch: bool = False
    past: "TurnRecord | None" = None
    dropped: int = 0
    outcome: Outcome = field(default_factory=lambda: Outcome(0.0))

    @property
    def known(self) -> int:
        """Return how many tokens of the prompt are the longest common prefix with the session's past."""
        return 0 if self.past is None else max(0, self.past.outcome.input_tokens - self.dropped)

    @property
    def new(self) -> int:
        """Return the tokens beyond that prefix, and those of the block in which it ends."""
        return self.outcome.input_tokens - self.known + _BLOCK

    @property
    def recomputed(self) -> int:
        """Return the tokens of the prompt that were computed."""
        return self.outcome.input_tokens - self.outcome.cached_tokens

    @property
    def missed(self) -> int:
        """Return how many known tokens were computed again, without those of the last block; 0: it is no miss."""
        return max(0, self.recomputed - self.new)


def summarize(title: str, records: Sequence[TurnRecord], seconds: float) -> dict[str, Any]:
    """Report an arm. Ratios and times to the first token are those of requests with a past; first requests have none
    and are reported beside them."""
    good = [record for record in records if not record.outcome.error]
    later, first = [r for r in good if r.past is not None], [r for r in good if r.past is None]
    report: dict[str, Any] = {
        "title": title,
        "seconds": round(seconds, 1),
        "requests": len(good),
        "failed": len(records) - len(good),
        "sub_agent_requests": sum(record.is_sub_agent for record in good),
        "branches": sum(record.is_branch for record in good),
        "later": _figures(later),
        "first": _figures(first),
        "clients": {
            str(client): _figures([record for record in later if record.client is client])
            for client in AgentClient
            if any(record.client is client for record in later)
        },
        "cached_share_by_turn": cached_shares(later),
        "misses": misses(later),
    }
    if errors := sorted({record.outcome.error for record in records if record.outcome.error}):
        report["errors"] = errors[:5]
    return report


def _figures(records: Sequence[TurnRecord]) -> dict[str, Any]:
    new, recomputed = sum(r.new for r in records), sum(r.recomputed for r in records)
    ttft = [record.outcome.ttft * 1e3 for record in records]
    return {
        "requests": len(records),
        "prompt_tokens": sum(record.outcome.input_tokens for record in records),
        "new_tokens": new,
        "recomputed_tokens": recomputed,
        "recomputed_per_new": round(recomputed / new, 4) if new else None,
        "ttft_ms_p50": round(percentile(ttft, 50), 1) if ttft else None,
        "ttft_ms_p99": round(percentile(ttft, 99), 1) if ttft else None,
    }


def cached_shares(records: Iterable[TurnRecord]) -> dict[str, float]:
    """Return which share of the known tokens was cached, by the number of the request in a main line."""
    known: Counter[str] = Counter()
    cached: Counter[str] = Counter()
    for record in records:
        if record.is_sub_agent:
            continue
        name = next((_bin_name(*span) for span in _BINS if span[0] <= record.number <= span[1]), "later")
        known[name] += record.known
        cached[name] += min(record.outcome.cached_tokens, record.known)
    return {name: round(cached[name] / known[name], 4) for name in known if known[name]}


def _bin_name(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def misses(records: Iterable[TurnRecord]) -> dict[str, Any]:
    """Return how many requests had known tokens computed again, and how many tokens, by the cause that the mesh
    named."""
    counts: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for record in records:
        if record.missed:
            cause = record.outcome.miss_cause or _UNNAMED
            counts[cause] += 1
            tokens[cause] += record.missed
    total = counts.total()
    return {
        "requests": total,
        "named_share": round(1 - counts[_UNNAMED] / total, 4) if total else 1.0,
        "by_cause": {name: {"requests": counts[name], "tokens": tokens[name]} for name, _ in counts.most_common()},
    }


def tables(reports: Sequence[dict[str, Any]]) -> list[Table]:
    """Make the tables: what was computed and waited for, then what was cached by turn, then the causes of misses."""
    clients = [name for name in map(str, AgentClient) if any(name in report["clients"] for report in reports)]
    main = _table("Recomputed prompt tokens by new ones, and time to the first token in ms")
    for column in ("arm", *clients, "all", "p50", "p99", "first turns' p99", "misses", "named", "failed"):
        main.add_column(column, justify="left" if column == "arm" else "right")
    for report in reports:
        later, miss = report["later"], report["misses"]
        ratios = [report["clients"].get(name, {}).get("recomputed_per_new") for name in clients]
        times = (later["ttft_ms_p50"], later["ttft_ms_p99"], report["first"]["ttft_ms_p99"])
        main.add_row(
            report["title"],
            *(_cell(value, 2) for value in (*ratios, later["recomputed_per_new"])),
            *(_cell(value, 0) for value in times),
            f"{miss['requests']} of {later['requests']}",
            f"{miss['named_share']:.0%}",
            str(report["failed"]),
        )
    return [main, _by_turn(reports), _causes(reports)]


def _by_turn(reports: Sequence[dict[str, Any]]) -> Table:
    names = [name for span in _BINS if any((name := _bin_name(*span)) in r["cached_share_by_turn"] for r in reports)]
    shown = _table("Cached share of what the session had sent before, by turn of its main line")
    for column in ("arm", *names):
        shown.add_column(column, justify="left" if column == "arm" else "right")
    for report in reports:
        shares = report["cached_share_by_turn"]
        shown.add_row(report["title"], *(f"{shares[name]:.1%}" if name in shares else "-" for name in names))
    return shown


def _causes(reports: Sequence[dict[str, Any]]) -> Table:
    shown = _table("Misses by cause: requests, and tokens computed again")
    for column in ("arm", "cause", "requests", "tokens"):
        shown.add_column(column, justify="left" if column in ("arm", "cause") else "right")
    for report in reports:
        for cause, counts in report["misses"]["by_cause"].items():
            shown.add_row(report["title"], cause, f"{counts['requests']:,}", f"{counts['tokens']:,}")
    return shown


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold")


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"

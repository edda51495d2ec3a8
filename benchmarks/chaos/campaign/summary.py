"""Counts what became of the requests, by kind of fault, and checks the limits of a campaign."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...report.stats import percentile
from ..clients.record import Record
from ..faults.fault import Action, Fault, Injection
from .attribution import is_expired, is_failed, is_pause_excused, met, outlived_gateway
from .options import ChaosOptions

NO_FAULT = "no fault"
_SETTLED_SECONDS = 2.0
"""After this time from the beginning of a fault its cost must have ended, if the campaign limits the TTFT."""


@dataclass
class Row:
    """What one kind of fault did to the requests that met it."""

    kind: str
    faults: int = 0
    took_effect: int = 0
    requests: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    """Failed requests by the kind of failure, without those that no mesh could have saved."""
    excused: int = 0
    """Requests of clients that do not resume, lost with their gateway."""
    expired: int = 0
    """Requests whose deadline passed while no engine was there."""
    outlived: int = 0
    """Requests of clients that know one gateway, complete although it was killed meanwhile."""
    wrong: int = 0
    refused: int = 0
    cut: int = 0
    """Streams that ended without an error event."""
    resumed: int = 0
    added: list[float] = field(default_factory=list)
    """Added latency of each successful request, in seconds."""
    pauses: list[float] = field(default_factory=list)
    """Added longest pause of each successful request, in seconds."""
    restarts: list[float] = field(default_factory=list)
    """Seconds until a part served again."""

    @property
    def failed(self) -> int:
        return self.failures.total()

    def report(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "faults": self.faults,
            "took_effect": self.took_effect,
            "requests": self.requests,
            "failed": self.failed,
            "failures": dict(self.failures),
            "wrong": self.wrong,
            "lost_with_their_gateway": self.excused,
            "outlived_their_gateway": self.outlived,
            "expired": self.expired,
            "refused_connections": self.refused,
            "streams_cut": self.cut,
            "resumed": self.resumed,
            "added_s": _spread(self.added),
            "added_pause_s": _spread(self.pauses),
            "restart_s": _spread(self.restarts),
        }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    spread = {"p50": percentile(values, 50), "p99": percentile(values, 99), "max": max(values, default=math.nan)}
    return {name: None if math.isnan(value) else round(value, 3) for name, value in spread.items()}


def fault_name(fault: Fault) -> str:
    """Return the name of a kind of fault, such as ``kill gateway``."""
    return f"{fault.action.value} {fault.kind.name}"


def rows_of(records: Sequence[Record], injections: Sequence[Injection]) -> list[Row]:
    """Return a row for each kind of fault, then one for requests that met none, then the total."""
    rows = {name: Row(name) for name in sorted({fault_name(each.fault) for each in injections})}
    rows |= {NO_FAULT: Row(NO_FAULT), "all": Row("all")}
    for injection in injections:
        for name in (fault_name(injection.fault), "all"):
            rows[name].faults += 1
            rows[name].took_effect += injection.took_effect
            if injection.served_again is not None:
                rows[name].restarts.append(injection.served_again)
    for record in records:
        cause = met(record, injections)
        for name in (NO_FAULT if cause is None else fault_name(cause.fault), "all"):
            _count(rows[name], record, injections)
    return list(rows.values())


def _count(row: Row, record: Record, injections: Sequence[Injection]) -> None:
    row.requests += 1
    row.wrong += record.is_wrong
    row.refused += record.refused
    row.resumed += record.resumed
    row.outlived += outlived_gateway(record, injections)
    if record.failure is None:
        if not is_pause_excused(record, injections):
            row.added.append(record.added)
            row.pauses.append(record.added_pause)
    elif is_failed(record, injections):
        row.failures[record.failure] += 1
        row.cut += record.failure == "cut"
    elif is_expired(record, injections):
        row.expired += 1
    else:
        row.excused += 1


def violations(options: ChaosOptions, records: Sequence[Record], injections: Sequence[Injection]) -> list[str]:
    """Return every limit of the campaign that was violated, in words."""
    total = rows_of(records, injections)[-1]
    success = 1 - total.failed / max(total.requests, 1)
    ended = [each for each in injections if each.fault.action in (Action.KILL, Action.TERM)]
    checks: list[tuple[str, float, float | None]] = [
        ("faults without effect", total.faults - total.took_effect, 0),
        ("parts that did not serve again", sum(each.served_again is None for each in ended), 0),
        ("failed requests", total.failed, options.max_failed),
        ("wrong answers", total.wrong, options.max_wrong),
        ("refused connections", total.refused, options.max_refused),
        ("streams cut without an error event", total.cut, options.max_cut),
        ("p99 of the added latency in s", percentile(total.added, 99), options.max_added_p99),
        ("longest added pause in s", max(total.pauses, default=math.nan), options.max_pause),
        ("added p99 TTFT in s", added_ttft(records, injections), options.max_added_ttft_p99),
    ]
    found = [
        f"{name}: {value:.6g}; the limit is {limit:g}"
        for name, value, limit in checks
        if limit is not None and not value <= limit  # NaN, without any value to judge, is a violation too
    ]
    if options.min_success is not None and success < options.min_success:
        found.append(f"share of successful requests: {success:.5f}; the limit is {options.min_success:g}")
    if total.requests < options.requests:
        found.append(f"requests: {total.requests}; at least {options.requests} were asked for")
    return found


def added_ttft(records: Sequence[Record], injections: Sequence[Injection]) -> float:
    """Return by how many seconds the p99 TTFT during faults, without their first 2 s, exceeds that between them."""
    during, between = [], []
    for record in records:
        if record.ttft is None:
            continue
        if any(each.began + _SETTLED_SECONDS <= record.sent < each.ended for each in injections):
            during.append(record.ttft)
        elif met(record, injections) is None:
            between.append(record.ttft)
    return percentile(during, 99) - percentile(between, 99)

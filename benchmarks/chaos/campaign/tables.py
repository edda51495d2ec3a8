"""Shows the results of a campaign as tables."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table


def tables(report: dict[str, Any]) -> list[Table]:
    """Return the table of each layout, the failures and the violated limits."""
    shown = [_layout_table(report["campaign"], layout) for layout in report["layouts"]]
    if examples := [each for layout in report["layouts"] for each in layout["examples"]]:
        shown.append(_lines("Failed requests and wrong answers", examples))
    shown.append(_lines("Violated limits", report["violations"] or ["none"]))
    run = f"seed {report['seed']}, {report['date']}, {report['machine']['cpu']}, {report['machine']['cores']} cores"
    return [*shown, _lines("Run", [run])]


def _layout_table(campaign: str, layout: dict[str, Any]) -> Table:
    title = f"{campaign}, layout {layout['layout']}, {layout['seconds']:.0f} s of faults"
    shown = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    shown.add_column("fault")
    for name in ("faults", "took effect", "requests", "failed", "wrong", "lost with gateway", "expired", "refused"):
        shown.add_column(name, justify="right")
    for name in ("cut", "resumed", "added p50 / p99 / max s", "longest pause s", "restart p50 / max s"):
        shown.add_column(name, justify="right")
    for row in layout["rows"]:
        if row["kind"] == "all":
            shown.add_section()
        shown.add_row(*_cells(row))
    return shown


def _cells(row: dict[str, Any]) -> list[str]:
    failed = str(row["failed"])
    if row["failures"]:
        failed += " (" + ", ".join(f"{count} {name}" for name, count in row["failures"].items()) + ")"
    counts = (row[name] for name in ("wrong", "lost_with_their_gateway", "expired", "refused_connections"))
    return [
        row["kind"],
        *(str(row[name]) for name in ("faults", "took_effect", "requests")),
        failed,
        *map(str, counts),
        str(row["streams_cut"]),
        str(row["resumed"]),
        _numbers(row["added_s"], "p50", "p99", "max"),
        _numbers(row["added_pause_s"], "max"),
        _numbers(row["restart_s"], "p50", "max"),
    ]


def _numbers(spread: dict[str, float | None], *names: str) -> str:
    return " / ".join("-" if spread[name] is None else f"{spread[name]:.2f}" for name in names)


def _lines(title: str, lines: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    for line in lines:
        shown.add_row(line)
    return shown

"""Writes the results of a campaign as Markdown, which is read in a terminal and kept in the documentation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_COLUMNS = (
    "fault",
    "faults",
    "requests",
    "failed",
    "wrong",
    "lost with gateway",
    "expired",
    "refused",
    "resumed",
    "added s: p50 / p99 / max",
    "longest pause s",
    "restart s: max",
)


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return the table of each layout, the first failures and the violated limits."""
    sections = [_layout(report, layout) for layout in report["layouts"]]
    if examples := [each for layout in report["layouts"] for each in layout["examples"]]:
        sections.append(["Failed requests and wrong answers:", "", *(f"- {each}" for each in examples)])
    violations = report["violations"]
    sections.append(["Violated limits:", "", *(f"- {each}" for each in violations)] if violations else [_KEPT])
    return "\n\n".join("\n".join(lines) for lines in sections)


_KEPT = "No limit was violated."


def _layout(report: Mapping[str, Any], layout: Mapping[str, Any]) -> list[str]:
    machine = report["machine"]
    lines = [
        f"**{report['campaign']}, layout {layout['layout']}**: {layout['seconds']:.0f} s of faults, "
        f"seed {report['seed']}, {report['date']}, {machine['cpu']}, {machine['cores']} cores"
    ]
    if (ttft := layout["added_ttft_p99_s"]) is not None:
        lines.append(f"(p99 TTFT during faults, without their first 2 s: {1000 * ttft:+.0f} ms)")
    return [*lines, "", *_table([_cells(row) for row in layout["rows"]])]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    yield _line(name.ljust(width) for name, width in zip(_COLUMNS, widths, strict=True))
    yield _line("-" * width if index == 0 else "-" * (width - 1) + ":" for index, width in enumerate(widths))
    for row in rows:
        yield _line(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )


def _line(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Mapping[str, Any]) -> list[str]:
    failed = str(row["failed"])
    if row["failures"]:
        failed += " (" + ", ".join(f"{count} {name}" for name, count in row["failures"].items()) + ")"
    faults = str(row["faults"])
    if row["took_effect"] < row["faults"]:
        faults += f" ({row['took_effect']} took effect)"
    counts = ("wrong", "lost_with_their_gateway", "expired", "refused_connections", "resumed")
    return [
        row["kind"],
        faults,
        str(row["requests"]),
        failed,
        *(str(row[name]) for name in counts),
        _numbers(row["added_s"], "p50", "p99", "max"),
        _numbers(row["added_pause_s"], "max"),
        _numbers(row["restart_s"], "max"),
    ]


def _numbers(spread: Mapping[str, float | None], *names: str) -> str:
    return " / ".join("-" if spread[name] is None else f"{spread[name]:.2f}" for name in names)

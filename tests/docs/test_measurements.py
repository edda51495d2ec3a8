"""Every table of measured figures says at which commit, when, on what and by which command it was taken."""

import datetime
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from tokenloom.cli.main import app

from .markdown_page import ROOT

PAGES = (
    "README.md",
    "docs/operate/scaling.md",
    "docs/understand/benchmarks.md",
    "docs/understand/disaggregation.md",
    "docs/understand/local-streams.md",
    "docs/use/clients.md",
    "docs/use/speculation.md",
)
NOT_MEASURED = ("| engines | streams | gateways |", "| work | grows with |", "| of a session | here |")
"""Heads of tables that are computed from others, list limits, or describe a load."""
UNKNOWN = "not recorded"
_ORIGIN = re.compile(r"\*Recorded at `([0-9a-f]{8})`, (\S+); processor: ([^;]+); command: (.+)\.\*")
_PROCESSORS = re.compile(
    r"(AMD EPYC|Intel Xeon)( with [\w -]+)?, \d+ cores?(, shared)?"
    r"|AVX2(, 1 core)?, the rest not recorded|a simulation|not recorded"
)


def tables(text: str) -> Iterator[tuple[str, list[str], str]]:
    """Yield the head and rows of each table, and the paragraph that follows it."""
    lines, place = text.splitlines(), 0
    while place < len(lines):
        end = place
        while end < len(lines) and lines[end].lstrip().startswith("|"):
            end += 1
        if end - place > 2:
            after = "\n".join(lines[end + 1 :]).split("\n\n", 1)[0]
            yield lines[place].strip(), [line.strip() for line in lines[place + 2 : end]], " ".join(after.split())
        place = end + 1


def is_measured(head: str, rows: Sequence[str]) -> bool:
    """Say whether at least half of the cells beside the first column are figures."""
    cells = [cell for row in rows for cell in row.strip("|").split("|")[1:]]
    figures = [cell for cell in cells if re.search(r"\d", cell) and "`" not in cell]
    return len(figures) * 2 >= len(cells) > 0 and not head.startswith(NOT_MEASURED)


def fault(origin: str) -> str:
    """Return what is wrong with the line under a table; empty if nothing is."""
    match = _ORIGIN.match(origin)
    if match is None:
        return "write: *Recorded at `COMMIT`, DATE; processor: …; command: `…`.*"
    _, date, processor, command = match.groups()
    datetime.date.fromisoformat(date)
    if not _PROCESSORS.fullmatch(processor):
        return f"processor: {processor}"
    commands = get_command(app).commands["bench"].commands  # type: ignore[attr-defined]
    for name in re.findall(r"tokenloom bench ([a-z]+)", command):
        if name not in commands:
            return f"there is no tokenloom bench {name}"
    for module in re.findall(r"python -m (\S+?)[ `]", command):
        if find_spec(module) is None:
            return f"there is no module {module}"
    return "" if "`" in command or command in (UNKNOWN, "the commands of the table") else f"command: {command}"


@pytest.mark.parametrize("page", PAGES)
def test_tables_say_where_their_figures_are_from(page: str) -> None:
    text = (ROOT / page).read_text()
    found = [(head, fault(after)) for head, rows, after in tables(text) if is_measured(head, rows)]
    assert found
    assert [each for each in found if each[1]] == []


def test_a_table_without_its_origin_is_found() -> None:
    text = "| case | ms |\n|---|---|\n| one | 1.5 |\n\nThat is quick.\n"
    ((head, rows, after),) = tables(text)
    assert is_measured(head, rows)
    assert fault(after)
    origin = "*Recorded at `0123abcd`, 2026-11-20; processor: {}; command: `{}`.*"
    assert not fault(origin.format("AMD EPYC with AVX2, 2 cores", "tokenloom bench kv"))
    assert fault(origin.format("a quick machine", "tokenloom bench kv"))
    assert fault(origin.format("AMD EPYC, 2 cores", "python -m tokenloom.bench.nothing "))


def test_pages_with_many_measured_tables_are_all_listed() -> None:
    others = [path for path in (ROOT / "docs").rglob("*.md") if _is_of_measurements(path)]
    assert {str(path.relative_to(ROOT)) for path in others} <= set(PAGES)


def _is_of_measurements(path: Path) -> bool:
    measured = [head for head, rows, _ in tables(path.read_text()) if is_measured(head, rows)]
    return any(re.search(r"\b(ms|µs|tokens/s|GB/s|speed)\b", head) for head in measured) and path.name != "decisions.md"

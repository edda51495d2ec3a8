"""Draws the figures of docs/understand/benchmarks.md, as ``tokenloom bench … --plot`` draws those of a run."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenloom.bench.report.bar_plot import Bar, bars_svg, stacks_svg

PAGE = Path(__file__).parents[2] / "docs" / "understand" / "benchmarks.md"
_CELL = re.compile(r"([\d.,]+)(?: \(([\d.,]+) - ([\d.,]+)\))?")


@dataclass(frozen=True, slots=True)
class Chart:
    """Holds a picture that is drawn."""

    text: str

    def svg(self) -> str:
        """Return the file's text."""
        return self.text


def engines_with_amx() -> Chart:
    """Draw the comparison with other engines on a processor with AMX."""
    return _engines(0, ["single-stream", "first token of 64", "batch", "shared-prefix"], "Intel Xeon with AMX")


def engines_with_avx512() -> Chart:
    """Draw the comparison with other engines on a processor with AVX-512."""
    wanted = ["single-stream", "first token of 64", "first token of 512", "batch", "shared-prefix"]
    return _engines(1, wanted, "AMD EPYC with AVX-512 BF16")


def cost_of_the_mesh() -> Chart:
    """Draw the CPU time of a token in each part of a mesh, by the length of the engine's steps."""
    head, *rows = _table("## What the mesh costs", 0)
    parts = head[head.index("gateway") : head.index("all")]
    wanted = {row[0]: row for row in rows}
    costs = {
        f"steps of {step}": {part: float(wanted[step][head.index(part)]) for part in parts}
        for step in ("4 ms", "10 ms", "20 ms")
    }
    return Chart(stacks_svg(costs, "µs", "CPU time of a token in each part of the mesh, 64 streams"))


def _engines(number: int, wanted: Sequence[str], processor: str) -> Chart:
    head, *rows = _table("### qwen3-0.6b", number)
    groups = {}
    for name in wanted:
        row = next(each for each in rows if each[0].startswith(f"{name},"))  # a second run may follow
        better = "less is better" if row[0].endswith("ms") else "more is better"
        cells = zip(head[1:], row[1:], strict=True)
        groups[f"{row[0]} ({better})"] = [bar for engine, cell in cells if (bar := _bar(engine, cell)) is not None]
    return Chart(bars_svg(groups, f"qwen3-0.6b in bfloat16 on two cores of an {processor}"))


def _bar(engine: str, cell: str) -> Bar | None:
    """Return a bar of "22.1 (21.3 - 23.0)"; None for a cell without figures, and for a ratio."""
    match = _CELL.fullmatch(cell)
    if match is None or engine.startswith("ratio"):
        return None
    value, least, most = (float((each or match[1]).replace(",", "")) for each in match.groups())
    return Bar(engine, value, least, most)


def _table(heading: str, number: int) -> list[list[str]]:
    """Return the rows of cells of a table below a heading, the head first; ``number``: which of its tables."""
    section = PAGE.read_text().partition(f"\n{heading}\n")[2]
    text = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)[number]
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]

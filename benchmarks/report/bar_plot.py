"""Draws bars as a small SVG file without a library: a group for each workload, a bar for each engine."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .plot import COLOURS

_WIDTH, _ROW, _MARGIN, _NAMES = 640, 18, 12, 110


@dataclass(frozen=True)
class Bar:
    """Holds one figure and its range."""

    name: str
    value: float
    least: float
    most: float


def bars_svg(groups: Mapping[str, Sequence[Bar]], unit: str) -> str:
    """Draw the groups. Each has a scale of its own; a thin line spans least to most."""
    parts, top = [], _MARGIN
    for title, bars in groups.items():
        parts.append(f'<text x="{_MARGIN}" y="{top + 12}" font-weight="bold">{html.escape(f"{title}, {unit}")}</text>')
        top += _ROW + 4
        largest = max((bar.most for bar in bars), default=0.0) or 1.0
        for index, bar in enumerate(bars):
            parts.append(_bar(bar, COLOURS[index % len(COLOURS)], largest, top))
            top += _ROW
        top += _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" viewBox="0 0 {_WIDTH} {top}" '
        'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def write_bars(path: Path, groups: Mapping[str, Sequence[Bar]], unit: str) -> None:
    """Write the file."""
    path.write_text(bars_svg(groups, unit))


def _bar(bar: Bar, colour: str, largest: float, top: int) -> str:
    scale = (_WIDTH - _NAMES - 90) / largest
    least, most = _NAMES + bar.least * scale, _NAMES + bar.most * scale
    middle = top + _ROW // 2
    return (
        f'<text x="{_NAMES - 6}" y="{middle + 4}" text-anchor="end">{html.escape(bar.name)}</text>'
        f'<rect class="bar" x="{_NAMES}" y="{top + 2}" width="{bar.value * scale:.1f}" height="{_ROW - 5}" '
        f'fill="{colour}"/>'
        f'<line x1="{least:.1f}" x2="{most:.1f}" y1="{middle}" y2="{middle}" stroke="black"/>'
        f'<text x="{most + 6:.1f}" y="{middle + 4}">{bar.value:,.1f}</text>'
    )

"""Draws cumulative distributions as small SVG files, without a library."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_WIDTH, _HEIGHT, _MARGIN = 380, 260, 46
COLOURS = ("#2563eb", "#dc2626", "#059669", "#9333ea", "#d97706")
_POINTS = 200
_TICKS = 4


@dataclass(frozen=True)
class Panel:
    """Holds one distribution for each series."""

    title: str
    unit: str
    series: Mapping[str, Sequence[float]]


def cdf_svg(panels: Sequence[Panel]) -> str:
    """Draw the share of values up to x, over x, with the panels in a row."""
    body = "".join(_panel(panel, index * _WIDTH) for index, panel in enumerate(panels))
    width = _WIDTH * len(panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def write_cdfs(path: Path, panels: Sequence[Panel]) -> None:
    """Write the file."""
    path.write_text(cdf_svg(panels))


def _panel(panel: Panel, left: int) -> str:
    largest = max((max(values) for values in panel.series.values() if values), default=0.0) or 1.0
    inner_width, inner_height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    parts = [
        f'<g transform="translate({left + _MARGIN} {_MARGIN})">',
        f'<text x="0" y="-26" font-weight="bold">{html.escape(panel.title)} ({html.escape(panel.unit)})</text>',
    ]
    for tick in range(_TICKS + 1):
        x, y = inner_width * tick / _TICKS, inner_height * (1 - tick / _TICKS)
        parts.append(f'<line x1="0" x2="{inner_width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{tick / _TICKS:.2f}</text>')
        parts.append(
            f'<text x="{x:.1f}" y="{inner_height + 16}" text-anchor="middle">{largest * tick / _TICKS:.3g}</text>'
        )
    for index, (name, values) in enumerate(panel.series.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = _points(values, largest, inner_width, inner_height)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{index * 120}" y="-10" fill="{colour}">{html.escape(name)}</text>')
    return "".join([*parts, "</g>"])


def _points(values: Sequence[float], largest: float, width: int, height: int) -> str:
    """Return at most `_POINTS` points of the curve, always with the last value."""
    ordered = sorted(values)
    step = max(1, len(ordered) // _POINTS)
    ranks = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return " ".join(
        f"{ordered[rank] / largest * width:.1f},{height * (1 - (rank + 1) / len(ordered)):.1f}" for rank in ranks
    )

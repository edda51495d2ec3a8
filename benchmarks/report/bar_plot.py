"""Draws bars as small SVG files without a library: a group for each figure, a bar for each engine; or bars of parts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

_WIDTH, _ROW, _MARGIN, _NAMES, _FIGURES = 640, 22, 18, 120, 90
_COLOURS = ("#5b7fe0", "#de7636", "#22a094", "#8a63d8", "#cf9415", "#d64545")
"""Told apart on a white and on a dark page, and by most who do not see all colours."""
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:#1c2333}"
    ".tiny{font-size:11.5px}.strong{font-weight:650}.end{text-anchor:end}.page{fill:#fff}"
    ".range{stroke:#1c2333;stroke-width:1.4}"
    + "".join(f".c{number}{{fill:{colour}}}" for number, colour in enumerate(_COLOURS))
    + "@media(prefers-color-scheme:dark){text{fill:#e9ecf4}.page{fill:#171b24}.range{stroke:#e9ecf4}}"
)


@dataclass(frozen=True)
class Bar:
    """Holds one figure and its range."""

    name: str
    value: float
    least: float
    most: float


def bars_svg(groups: Mapping[str, Sequence[Bar]], title: str) -> str:
    """Draw the groups, by what their figures are. Each has a scale of its own; a thin line spans least to most."""
    names = list(dict.fromkeys(bar.name for bars in groups.values() for bar in bars))
    shapes, top = [], _MARGIN
    for group, bars in groups.items():
        shapes.append(_text(_MARGIN, top + 13, group, "small strong"))
        top += _ROW
        largest = max((bar.most for bar in bars), default=0.0) or 1.0
        for bar in bars:
            shapes += _bar(bar, names.index(bar.name), largest, top)
            top += _ROW
        top += _MARGIN
    figures = {group: ", ".join(f"{bar.name} {_figure(bar.value)}" for bar in bars) for group, bars in groups.items()}
    return _svg(shapes, top, title, (f"{group}: {said}" for group, said in figures.items()))


def stacks_svg(rows: Mapping[str, Mapping[str, float]], unit: str, title: str) -> str:
    """Draw a bar for each row, of its parts side by side; all have one scale."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts))
    shapes, left, top = [], _MARGIN, _MARGIN
    for number, name in enumerate(names):
        width = 34 + round(7.4 * len(name))
        if left + width > _WIDTH - _MARGIN:
            left, top = _MARGIN, top + _ROW
        shapes.append(f'<rect class="c{number % len(_COLOURS)}" x="{left}" y="{top + 3}" width="11" height="11"/>')
        shapes.append(_text(left + 16, top + 13, name, "small"))
        left += width
    top += _ROW + _MARGIN // 2
    scale = (_WIDTH - _NAMES - _FIGURES) / (max((sum(parts.values()) for parts in rows.values()), default=0.0) or 1.0)
    for row, parts in rows.items():
        shapes.append(_text(_NAMES - 8, top + 15, row, "small end"))
        at = float(_NAMES)
        for name, value in parts.items():
            shapes.append(_rect(names.index(name), at, top, value * scale))
            at += value * scale
        shapes.append(_text(at + 8, top + 15, f"{_figure(sum(parts.values()))} {unit}", "tiny"))
        top += _ROW
    said = (
        f"{row}: {', '.join(f'{name} {_figure(value)}' for name, value in parts.items())} {unit}"
        for row, parts in rows.items()
    )
    return _svg(shapes, top + _MARGIN, title, said)


def write_bars(path: Path, groups: Mapping[str, Sequence[Bar]], title: str) -> None:
    """Write the file of :func:`bars_svg`."""
    path.write_text(bars_svg(groups, title))


def write_stacks(path: Path, rows: Mapping[str, Mapping[str, float]], unit: str, title: str) -> None:
    """Write the file of :func:`stacks_svg`."""
    path.write_text(stacks_svg(rows, unit, title))


def _bar(bar: Bar, number: int, largest: float, top: int) -> list[str]:
    scale = (_WIDTH - _NAMES - _FIGURES) / largest
    least, most, middle = _NAMES + bar.least * scale, _NAMES + bar.most * scale, top + _ROW / 2
    return [
        _text(_NAMES - 8, top + 15, bar.name, "small end"),
        _rect(number, _NAMES, top, bar.value * scale),
        f'<line class="range" x1="{least:.1f}" x2="{most:.1f}" y1="{middle:g}" y2="{middle:g}"/>',
        _text(max(most, _NAMES) + 8, top + 15, _figure(bar.value), "tiny"),
    ]


def _rect(number: int, left: float, top: int, width: float) -> str:
    style = f"bar c{number % len(_COLOURS)}"
    return f'<rect class="{style}" x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{_ROW - 6}"/>'


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:g}">{escape(text)}</text>'


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _svg(shapes: Iterable[str], height: int, title: str, said: Iterable[str]) -> str:
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-labelledby="title text">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="text">{escape(". ".join(said))}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="12"/>',
        *shapes,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"

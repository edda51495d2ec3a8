"""Collects shapes and writes them as one SVG file, readable on light and on dark pages."""

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]
"""x and y in pixels, from the upper left corner."""

_TONES = {
    "plain": ("#f4f5f8", "#98a1b3", "#242a37", "#8790a5"),
    "gateway": ("#e9efff", "#5b7fe0", "#202f5c", "#6f93f5"),
    "tokenizer": ("#e2f5f3", "#22a094", "#123f3c", "#35b8ab"),
    "output": ("#f1eafe", "#8a63d8", "#32264f", "#a784ee"),
    "coordinator": ("#fdf2da", "#cf9415", "#463514", "#e2ae3b"),
    "prefill": ("#fdeadf", "#de7636", "#4a2a18", "#ee9159"),
    "decode": ("#e4f4e4", "#4a9d52", "#1d3d22", "#63b96b"),
    "lost": ("#fde8e8", "#d64545", "#4a1d1f", "#ef6a6a"),
}
"""For each tone: fill and line on a light page, fill and line on a dark page."""
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_RADIUS = 9


class Canvas:
    """A picture that grows shape by shape. Later shapes lie above earlier ones."""

    def __init__(self, width: int, height: int, title: str, text: str) -> None:
        """``title`` and ``text`` describe the picture to readers who do not see it."""
        self._size = (width, height)
        self._described = (title, text)
        self._shapes: list[str] = []

    def panel(self, x: float, y: float, width: float, height: float, title: str = "") -> None:
        """Draw a frame that groups other shapes, with a small title above its upper left corner."""
        self._shapes.append(f'<rect class="panel" x="{x}" y="{y}" width="{width}" height="{height}" rx="14"/>')
        if title:
            self.text(x + 14, y + 22, title, "small strong")

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        tone: str,
        title: str,
        lines: Sequence[str] = (),
        *,
        copies: int = 0,
    ) -> None:
        """Draw a box with a bold title and lines of text in its middle. ``copies`` boxes show behind it."""
        for copy in range(copies, 0, -1):
            self._rect(x + 5 * copy, y + 5 * copy, width, height, f"{tone} behind")
        self._rect(x, y, width, height, tone)
        middle = y + height / 2 - 8.5 * len(lines) + 5
        self.text(x + width / 2, middle, title, "strong middle")
        for number, line in enumerate(lines, start=1):
            self.text(x + width / 2, middle + 17 * number + 1, line, "small soft middle")

    def cell(self, x: float, y: float, width: float, height: float, style: str, text: str = "") -> None:
        """Draw a small box, such as a KV block, with a short text in its middle. ``style``: a tone, one followed by
        ``-full`` for its strong colour, or ``free``."""
        self._shapes.append(
            f'<rect class="{style}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4" stroke-width="1.3"/>'
        )
        if text:
            on_full = " strong on-full" if style.endswith("-full") else ""
            self.text(x + width / 2, y + height / 2 + 4, text, f"tiny middle{on_full}")

    def text(self, x: float, y: float, text: str, style: str = "small") -> None:
        """Write one line. ``style``: classes such as small, tiny, soft, strong, middle, end and mono."""
        self._shapes.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, points: Sequence[Point], tone: str = "plain", *, style: str = "", both: bool = False) -> None:
        """Draw a line with rounded corners through the points, and a head at its end, or at both ends."""
        start = f' marker-start="url(#{tone})"' if both else ""
        self._shapes.append(
            f'<path class="line {tone}-line {style}" d="{_rounded(points)}"{start} marker-end="url(#{tone})"/>'
        )

    def line(self, points: Sequence[Point], style: str) -> None:
        """Draw a line without a head."""
        self._shapes.append(f'<path class="line {style}" d="{_rounded(points)}"/>')

    def label(self, x: float, y: float, text: str, style: str = "tiny soft middle") -> None:
        """Write a line of text on a patch of the page's colour, so that lines do not run through it."""
        width = 6.1 * len(text) + 8
        self._shapes.append(f'<rect class="page" x="{x - width / 2:g}" y="{y - 11:g}" width="{width:g}" height="15"/>')
        self.text(x, y, text, style)

    def number(self, x: float, y: float, number: int, tone: str = "plain") -> None:
        """Draw the number of a step in a disc."""
        self._shapes.append(f'<circle class="{tone}" cx="{x:g}" cy="{y:g}" r="9.5" stroke-width="1.4"/>')
        self.text(x, y + 4, str(number), "tiny strong middle")

    def cross(self, x: float, y: float, size: float = 9) -> None:
        """Draw the cross over a part that died."""
        self._shapes.append(
            f'<path class="line lost-line thick" d="M{x - size},{y - size}L{x + size},{y + size}'
            f'M{x + size},{y - size}L{x - size},{y + size}"/>'
        )

    def svg(self) -> str:
        """Return the file's text."""
        width, height = self._size
        title, text = (escape(line) for line in self._described)
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
            'aria-labelledby="title text">',
            f'<title id="title">{title}</title>',
            f'<desc id="text">{text}</desc>',
            f"<style>{_style()}</style>",
            f"<defs>{''.join(_head(tone) for tone in _TONES)}</defs>",
            f'<rect class="page" width="{width}" height="{height}" rx="16"/>',
            *self._shapes,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"

    def _rect(self, x: float, y: float, width: float, height: float, style: str) -> None:
        self._shapes.append(
            f'<rect class="{style}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{_RADIUS}"/>'
        )


def _rounded(points: Sequence[Point]) -> str:
    """Return the path through the points, with corners of a radius of up to 10 pixels."""
    path = [f"M{points[0][0]:g},{points[0][1]:g}"]
    for before, corner, after in zip(points, points[1:], points[2:], strict=False):
        first, second = _towards(corner, before), _towards(corner, after)
        path.append(f"L{first[0]:g},{first[1]:g}Q{corner[0]:g},{corner[1]:g} {second[0]:g},{second[1]:g}")
    path.append(f"L{points[-1][0]:g},{points[-1][1]:g}")
    return "".join(path)


def _towards(start: Point, end: Point) -> Point:
    """Return the point 10 pixels from ``start`` on the way to ``end``, or half of the way if that is nearer."""
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    share = min(10.0, length / 2) / length
    return (round(start[0] + (end[0] - start[0]) * share, 1), round(start[1] + (end[1] - start[1]) * share, 1))


def _head(tone: str) -> str:
    return (
        f'<marker id="{tone}" viewBox="0 0 10 10" refX="8.5" refY="5" markerWidth="9" markerHeight="9" '
        f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path class="{tone}-head" d="M0,0.8L9.5,5L0,9.2z"/>'
        "</marker>"
    )


def _style() -> str:
    light = {tone: (fill, line) for tone, (fill, line, _, _) in _TONES.items()}
    dark = {tone: (fill, line) for tone, (_, _, fill, line) in _TONES.items()}
    return "\n".join(
        [
            f"text{{font:15px {_FONT};fill:#1c2333}}",
            ".small{font-size:13px}.tiny{font-size:11.5px}.strong{font-weight:650}.soft{fill:#566075}",
            f".middle{{text-anchor:middle}}.end{{text-anchor:end}}.mono{{font-family:{_MONO}}}",
            "rect,circle{stroke-width:1.6}.behind{opacity:.55}",
            ".line{fill:none;stroke-width:1.8}.thick{stroke-width:3.4}.dashed{stroke-dasharray:5 4}",
            ".page{fill:#fff;stroke:none}.panel{fill:#fafbfd;stroke:#dfe3ec}.faint{stroke:#cfd5e1}",
            ".free{fill:#fff;stroke:#cfd5e1}.on-full{fill:#fff}",
            *_colours(light),
            "@media(prefers-color-scheme:dark){",
            "text{fill:#e9ecf4}.soft{fill:#a9b2c4}.page{fill:#171b24}.panel{fill:#1c212c;stroke:#343c4d}",
            ".faint{stroke:#3c4558}.free{fill:#171b24;stroke:#3c4558}.on-full{fill:#14171e}",
            *_colours(dark),
            "}",
        ]
    )


def _colours(tones: dict[str, tuple[str, str]]) -> list[str]:
    return [
        f".{tone}{{fill:{fill};stroke:{line}}}.{tone}-line{{stroke:{line}}}.{tone}-head{{fill:{line}}}"
        f".{tone}-full{{fill:{line};stroke:{line}}}"
        for tone, (fill, line) in tones.items()
    ]

"""Draws pictures of one or two coloured shapes, and says what is in them."""

import colorsys
import math
import random
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageDraw

CANVAS = 48
"""Pixels of a side as the model sees it; places and sizes are in these."""
PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("on the left", "in the middle", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
RELATIONS = ("to the left of", "to the right of", "above", "below")
SHAPES = ("circle", "square", "triangle", "star", "cross")
COLOURS: dict[str, tuple[float, float, float, float, float, float]] = {
    "red": (-0.02, 0.01, 0.8, 1.0, 0.75, 1.0),
    "orange": (0.065, 0.1, 0.85, 1.0, 0.9, 1.0),
    "yellow": (0.14, 0.17, 0.75, 1.0, 0.9, 1.0),
    "green": (0.28, 0.4, 0.7, 1.0, 0.45, 0.95),
    "blue": (0.57, 0.68, 0.75, 1.0, 0.6, 1.0),
    "purple": (0.75, 0.83, 0.6, 1.0, 0.45, 0.9),
    "black": (0.0, 1.0, 0.0, 0.1, 0.0, 0.12),
    "white": (0.0, 1.0, 0.0, 0.03, 0.97, 1.0),
}
"""Of each colour the lowest and the highest hue (in turns), saturation and value."""
BACKGROUNDS: dict[str, tuple[float, float, float, float, float, float]] = {
    "white": COLOURS["white"],
    "grey": (0.0, 1.0, 0.0, 0.04, 0.45, 0.75),
    "black": COLOURS["black"],
}
_SCALES = (1, 2, 4, 8)
"""Pixels drawn for each of the canvas: larger pictures are made smaller again, as those of users are."""


@dataclass(frozen=True)
class Shape:
    """Describes a shape: its centre, and its radius in pixels of the canvas."""

    name: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def place(self) -> str:
        """Where it is in the picture, in words."""
        return PLACES[3 * _third(self.y) + _third(self.x)]

    def relation(self, other: "Shape") -> str:
        """Return how it lies to another shape, in words."""
        if abs(self.x - other.x) > abs(self.y - other.y):
            return "to the left of" if self.x < other.x else "to the right of"
        return "above" if self.y < other.y else "below"

    def covers(self, x: float, y: float) -> bool:
        """Return whether the point is within the shape's bounding box."""
        return abs(x - self.x) <= self.radius and abs(y - self.y) <= self.radius


@dataclass(frozen=True)
class Scene:
    """Says what is in a picture: its shapes, and the colour behind them."""

    shapes: tuple[Shape, ...]
    background: str


def _third(position: float) -> int:
    return min(2, int(3 * position / CANVAS))


def _unclear(position: float) -> bool:
    """Return whether a centre is too near to a boundary between two words for places."""
    return any(abs(position - CANVAS * third / 3) < 1.5 for third in (1, 2))


def _shape(rng: random.Random, colours: list[str], smallest: float, largest: float) -> Shape:
    while True:
        radius = rng.uniform(smallest, largest)
        x, y = (rng.uniform(radius + 0.5, CANVAS - radius - 0.5) for _ in range(2))
        if not _unclear(x) and not _unclear(y):
            return Shape(rng.choice(SHAPES), rng.choice(colours), x, y, radius)


def _apart(first: Shape, second: Shape) -> bool:
    """Return whether two shapes differ, do not touch, and one is clearly above or beside the other."""
    across, down = abs(first.x - second.x), abs(first.y - second.y)
    gap = max(across, down) - first.radius - second.radius
    return first.name != second.name and first.colour != second.colour and gap > 1 and abs(across - down) > 5


def make_scene(rng: random.Random) -> Scene:
    """Return a scene of one or two shapes of different kinds and colours."""
    background = rng.choice(list(BACKGROUNDS))
    colours = [colour for colour in COLOURS if colour != background]
    if rng.random() < 0.5:
        return Scene((_shape(rng, colours, 7, 16),), background)
    while True:
        shapes = _shape(rng, colours, 6, 10), _shape(rng, colours, 6, 10)
        if _apart(*shapes):
            return Scene(shapes, background)


def draw(scene: Scene, rng: random.Random) -> Any:
    """Return the scene as a square RGB picture of pillow, of 48 to 384 pixels a side, in tones that vary."""
    scale = rng.choice(_SCALES)
    picture = Image.new("RGB", (CANVAS * scale, CANVAS * scale), _tone(BACKGROUNDS[scene.background], rng))
    pen = ImageDraw.Draw(picture)
    for shape in scene.shapes:
        fill = _tone(COLOURS[shape.colour], rng)
        x, y, radius = (scale * value for value in (shape.x, shape.y, shape.radius))
        if shape.name == "circle":
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=fill)
        else:
            pen.polygon(_corners(shape.name, x, y, radius, math.radians(rng.uniform(-8, 8))), fill=fill)
    return picture


def _tone(ranges: tuple[float, float, float, float, float, float], rng: random.Random) -> tuple[int, int, int]:
    hue, saturation, value = (rng.uniform(*ranges[i : i + 2]) for i in (0, 2, 4))
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue % 1, saturation, value))
    return red, green, blue


def _corners(name: str, x: float, y: float, radius: float, turned: float) -> list[tuple[float, float]]:
    """Return the corners of a shape that is turned by an angle in radians."""
    if name == "cross":
        points = [(1 / 3, 1.0), (1 / 3, 1 / 3), (1.0, 1 / 3)]
        for _ in range(3):  # the other three corners are the first one, turned
            points += [(down, -across) for across, down in points[-3:]]
    elif name == "square":
        points = [(side, end) for side, end in ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9))]
    else:
        count, inner = (3, 1.0) if name == "triangle" else (10, 0.42)
        angles = [2 * math.pi * i / count for i in range(count)]
        points = [(math.sin(a) * _reach(i, inner), -math.cos(a) * _reach(i, inner)) for i, a in enumerate(angles)]
    cosine, sine = math.cos(turned), math.sin(turned)
    return [(x + radius * (a * cosine - b * sine), y + radius * (a * sine + b * cosine)) for a, b in points]


def _reach(index: int, inner: float) -> float:
    return 1.0 if index % 2 == 0 else inner

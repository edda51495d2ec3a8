"""Families that cut a large image into tiles: InternVL, Idefics 3 and SmolVLM, LLaVA-OneVision.

Rounding, and the order of operations on floating point numbers, is that of the image processors.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE

from .media_text import Entries, MediaText, ShownMedia


@dataclass(frozen=True)
class InternVL:
    """InternVL: the grid of tiles whose shape is nearest, and the whole image again if there are several."""

    token: str
    begin: str
    end: str
    rows: int
    """Of a tile."""
    least: int
    most: int
    """Tiles of an image."""
    tile: tuple[int, int]
    """Height and width of a tile in pixels."""
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, begin: str, end: str, config: Entries, images: Entries, processor: Entries) -> "InternVL":
        rows = processor.number("image_seq_length", config.number("image_seq_length", 256))
        least, most = images.number("min_patches", 1), images.number("max_patches", 12)
        return cls(token, begin, end, rows, least, most, images.side("size", 384))

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        return MediaText(f"{self.begin}{self.token * (self.rows * self._tiles(size))}{self.end}")

    @cached_property
    def _grids(self) -> list[tuple[int, int]]:
        numbers = range(1, self.most + 1)
        grids = [(columns, lines) for columns in numbers for lines in numbers]
        return sorted((grid for grid in grids if self.least <= math.prod(grid) <= self.most), key=math.prod)

    def _tiles(self, size: ShownMedia) -> int:
        if self.most == 1:
            return 1
        (height, width), best, difference = self.tile, (1, 1), math.inf
        for columns, lines in self._grids:
            found = abs(size.width / size.height - columns / lines)
            covers = size.width * size.height > 0.5 * height * width * columns * lines
            if found < difference or (found == difference and covers):
                best, difference = (columns, lines), found
        tiles = math.prod(best)
        return tiles + 1 if tiles > 1 else 1


@dataclass(frozen=True)
class Idefics:
    """Idefics 3 and SmolVLM: every image is enlarged, cut into lines of tiles, and shown whole behind them."""

    token: str
    rows: int
    """Of a tile."""
    longest: int
    """Pixels of the longer side, after the image is scaled."""
    tile: int
    """Pixels of a tile's side."""
    splits: bool
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, images: Entries, processor: Entries) -> "Idefics":
        return cls(
            token,
            processor.number("image_seq_len", 169),
            images.part("size").number("longest_edge", 4 * 364),
            images.part("max_image_size").number("longest_edge", 364),
            images.flag("do_image_splitting", default=True),
        )

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        lines, columns = self._grid(size) if self.splits else (0, 0)
        tile, mark = self.token * self.rows, "<fake_token_around_image>"
        whole = f"{mark}<global-img>{tile}{mark}"
        if not lines:
            return MediaText(whole)
        parts = []
        for line in range(1, lines + 1):
            parts += [f"{mark}<row_{line}_col_{column}>{tile}" for column in range(1, columns + 1)]
            parts.append("\n")
        return MediaText("".join(parts) + "\n" + whole)

    def _grid(self, size: ShownMedia) -> tuple[int, int]:
        """Return the lines and columns of tiles; zeros if the whole image is one."""
        width, height, ratio = size.width, size.height, size.width / size.height
        if width >= height:
            width, height = self.longest, _even(int(self.longest / ratio))
        else:
            width, height = _even(int(self.longest * ratio)), self.longest
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            lines = math.ceil(int(columns * self.tile / ratio) / self.tile)
        else:
            lines = math.ceil(height / self.tile)
            columns = math.ceil(int(lines * self.tile * ratio) / self.tile)
        return (lines, columns) if lines * columns > 1 else (0, 0)


def _even(length: int) -> int:
    return length + length % 2


@dataclass(frozen=True)
class OneVision:
    """LLaVA-OneVision: an image that is alone in the prompt is cut into tiles on the canvas that wastes least; of
    several, each is shown once."""

    token: str
    rows: int
    """Of a tile."""
    canvases: tuple[tuple[int, int], ...]
    """Height and width in pixels."""
    tile: int
    most_tiles: int
    """The rows of more tiles are scaled down to theirs."""
    drops_first: bool
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = True

    @classmethod
    def read(cls, token: str, config: Entries, images: Entries, processor: Entries) -> "OneVision":
        height, width = images.side("size", 384)
        side = height // config.part("vision_config").number("patch_size", 14)
        pins = images.items("image_grid_pinpoints") or config.items("image_grid_pinpoints")
        aspect = processor.text("vision_aspect_ratio", config.text("vision_aspect_ratio", "anyres_max_9"))
        strategy = processor.text("vision_feature_select_strategy", config.text("vision_feature_select_strategy"))
        return cls(
            token,
            processor.number("num_image_tokens", side**2),
            tuple((int(pin[0]), int(pin[1])) for pin in pins),
            min(height, width),
            int(aspect.removeprefix("anyres_max_")),
            strategy == "default",
        )

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        num_rows = self.rows + 1 if count > 1 else self._num_rows(size)
        return MediaText(self.token * (num_rows - self.drops_first))

    def _num_rows(self, size: ShownMedia) -> int:
        width, height = size.width, size.height

        def fit(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - canvas[0] * canvas[1]

        side = math.isqrt(self.rows)
        lines, columns = (side * (length // self.tile) for length in max(self.canvases, key=fit))
        if width / height > columns / lines:
            lines -= (lines - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (lines / height), 7))) // 2 * 2
        ratio = math.sqrt(lines * columns / (self.most_tiles * side**2))
        if ratio > 1.1:
            lines, columns = int(lines // ratio), int(columns // ratio)
        return self.rows + lines * columns + lines  # a row behind each line

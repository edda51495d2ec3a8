"""Families that scale an image to whole patches and keep its shape: Qwen's, Pixtral and Mistral 3, Gemma 4.

Rounding, and the order of operations on floating point numbers, is that of the image processors.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE

from .media_text import OPTIONS_FIELD, Entries, MediaText, ShownMedia, option

_MOST_ASPECT = 200


@dataclass(frozen=True)
class Qwen:
    """Qwen2-VL to Qwen 3.5: the lines and columns of an image are known to rotary positions."""

    token: str
    side: int
    """Pixels of a row's square: of a patch, times the patches that are merged in each direction."""
    least: int
    most: int
    """Pixels of an image, after it is scaled."""
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset({"min_pixels", "max_pixels"})
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, images: Entries) -> "Qwen":
        size = images.part("size")
        least, most = size.number("shortest_edge", 56 * 56), size.number("longest_edge", 28 * 28 * 1280)
        side = images.number("patch_size", 14) * images.number("merge_size", 2)
        return cls(token, side, images.number("min_pixels", least), images.number("max_pixels", most))

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        lines, columns = self._grid(size)
        return MediaText(self.token * (lines * columns), (1, lines, columns))

    def _grid(self, size: ShownMedia) -> tuple[int, int]:
        width, height, side = size.width, size.height, self.side
        most = option(size, "max_pixels", self.most, side**2, self.most)
        least = option(size, "min_pixels", min(self.least, most), 1, most)
        if max(width, height) / min(width, height) > _MOST_ASPECT:
            raise ValueError(f"one side of it is more than {_MOST_ASPECT} times as long as the other")
        lines, columns = round(height / side), round(width / side)
        if lines * columns * side**2 > most:
            scale = math.sqrt((height * width) / most)
            lines, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
        elif lines * columns * side**2 < least:
            scale = math.sqrt(least / (height * width))
            lines, columns = (math.ceil(length * scale / side) for length in (height, width))
        return lines, columns


@dataclass(frozen=True)
class Pixtral:
    """Pixtral and Mistral 3: each line of an image ends with a token of its own."""

    token: str
    line_end: str
    image_end: str
    side: int
    """Pixels of a row's square."""
    longest: int
    """Pixels of an image's longer side, at most."""
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, config: Entries, images: Entries, processor: Entries) -> "Pixtral":
        vision = config.part("vision_config")
        patch = processor.number("patch_size", vision.number("patch_size", 16))
        # LLaVA's classes over this tower do not merge, whatever ``config.json`` says.
        merged = config.number("spatial_merge_size", 1) if config.text("model_type") == "mistral3" else 1
        merged = processor.number("spatial_merge_size", merged)
        return cls(
            token,
            processor.text("image_break_token", "[IMG_BREAK]"),
            processor.text("image_end_token", "[IMG_END]"),
            patch * merged,
            images.part("size").number("longest_edge", 1024),
        )

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        width, height = size.width, size.height
        ratio = max(height / self.longest, width / self.longest)
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        lines, columns = -(-height // self.side), -(-width // self.side)
        line = self.token * columns + self.line_end
        return MediaText((line * lines).removesuffix(self.line_end) + self.image_end)


_SOFT_TOKENS = (70, 140, 280, 560, 1120)


@dataclass(frozen=True)
class Gemma4:
    """Gemma 4: as many rows of whole squares as fit into a number of rows."""

    token: str
    begin: str
    end: str
    patch: int
    pooled: int
    """Patches of a row's square, in each direction."""
    most: int
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset({"max_soft_tokens"})
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, begin: str, end: str, images: Entries) -> "Gemma4":
        patch, pooled = images.number("patch_size", 16), images.number("pooling_kernel_size", 3)
        return cls(token, begin, end, patch, pooled, images.number("max_soft_tokens", 280))

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        return MediaText(f"{self.begin}{self.token * self._num_rows(size)}{self.end}")

    def _num_rows(self, size: ShownMedia) -> int:
        width, height = size.width, size.height
        most = size.options.get("max_soft_tokens", self.most)
        if most not in _SOFT_TOKENS:
            name = f"{OPTIONS_FIELD}.max_soft_tokens"
            raise InvalidArgument(f"{name} must be one of {', '.join(map(str, _SOFT_TOKENS))}", name)
        factor = math.sqrt(most * self.pooled**2 * self.patch**2 / (height * width))
        side = self.pooled * self.patch
        lines, columns = (math.floor(factor * length / side) for length in (height, width))
        if not lines:
            lines, columns = 1, min(width // height, most)
        elif not columns:
            lines, columns = min(height // width, most), 1
        return lines * columns

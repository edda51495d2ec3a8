"""Families of models that read images or hear sounds: how many tokens stand for one, and how they are written.

Some cut a large image into tiles (InternVL, Idefics 3 and SmolVLM, LLaVA-OneVision), some scale it to whole patches and
keep its shape (Qwen's, Pixtral and Mistral 3, Gemma 4), and some have the same number of rows for all images (LLaVA,
Gemma 3). Qwen2-Audio hears sounds. Rounding, and the order of operations on floating point numbers, is that of the
image processors.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.types_pb2 import MEDIA_KIND_AUDIO, MEDIA_KIND_IMAGE

from .media_text import OPTIONS_FIELD, Entries, MediaText, ShownMedia, option


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
        most = option(size, "max_pixels", self.most, self.side**2, self.most)
        least = option(size, "min_pixels", min(self.least, most), 1, most)
        return scaled_grid(size.width, size.height, self.side, least, most)


def scaled_grid(
    width: int, height: int, side: int, least: int, most: int, *, shown: int = 1, frames: int = 1
) -> tuple[int, int]:
    """Return the lines and columns of squares of ``side`` pixels to which Qwen's processors scale an image, so that it
    has from ``least`` to ``most`` pixels; with ``frames``, a video of so many, of which ``shown`` count at first.

    Raises ``ValueError`` for one that is too narrow.
    """
    if max(width, height) / min(width, height) > _MOST_ASPECT:
        raise ValueError(f"one side of it is more than {_MOST_ASPECT} times as long as the other")
    lines, columns = round(height / side), round(width / side)
    if shown * lines * columns * side**2 > most:
        scale = math.sqrt((frames * height * width) / most)
        lines, columns = (max(1, math.floor(length / scale / side)) for length in (height, width))
    elif shown * lines * columns * side**2 < least:
        scale = math.sqrt(least / (frames * height * width))
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
    def read(cls, token: str, begin: str, end: str, images: Entries, most: int = 280) -> "Gemma4":
        """``most``: rows, where ``images`` does not say."""
        patch, pooled = images.number("patch_size", 16), images.number("pooling_kernel_size", 3)
        return cls(token, begin, end, patch, pooled, images.number("max_soft_tokens", most))

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        return MediaText(f"{self.begin}{self.token * math.prod(self.grid(size))}{self.end}")

    @property
    def side(self) -> int:
        """Pixels of a row's square."""
        return self.pooled * self.patch

    def grid(self, size: ShownMedia) -> tuple[int, int]:
        """Return the lines and columns of squares, of which each is a row."""
        width, height = size.width, size.height
        most = size.options.get("max_soft_tokens", self.most)
        if most not in _SOFT_TOKENS:
            name = f"{OPTIONS_FIELD}.max_soft_tokens"
            raise InvalidArgument(f"{name} must be one of {', '.join(map(str, _SOFT_TOKENS))}", name)
        factor = math.sqrt(most * self.pooled**2 * self.patch**2 / (height * width))
        lines, columns = (math.floor(factor * length / self.side) for length in (height, width))
        if not lines:
            lines, columns = 1, min(width // height, most)
        elif not columns:
            lines, columns = min(height // width, most), 1
        return lines, columns


@dataclass(frozen=True)
class Uniform:
    """Writes the same text for every image, whatever its size."""

    token: str
    mark: str
    image: str
    kind: ClassVar = MEDIA_KIND_IMAGE
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = False

    def text(self, size: ShownMedia, count: int) -> MediaText:
        return MediaText(self.image)


def llava(token: str, config: Entries, images: Entries, processor: Entries) -> Uniform:
    """Return how LLaVA writes images. ``images``: what the image processor reads; ``processor``: the whole one."""
    crops = images.flag("do_center_crop", default=True)
    height, width = images.side("crop_size", 224) if crops else images.side("size")
    vision = config.part("vision_config")
    patch, is_clip = vision.number("patch_size", 14), "clip" in vision.text("model_type", "clip")
    strategy = config.text("vision_feature_select_strategy", "default")
    extra = int(is_clip)  # the class token in front, which the strategy takes away again
    if "patch_size" in processor:
        patch, extra = processor.number("patch_size"), processor.count("num_additional_image_tokens")
        strategy = processor.text("vision_feature_select_strategy")
    num_rows = (height // patch) * (width // patch) + extra - (strategy == "default")
    return Uniform(token, token, token * num_rows)


def gemma3(token: str, begin: str, end: str, config: Entries, processor: Entries) -> Uniform:
    """Return how Gemma 3 writes images, whose mark in templates is the token that begins them."""
    num_rows = processor.number("image_seq_length", config.number("mm_tokens_per_image", 256))
    return Uniform(token, begin, f"\n\n{begin}{token * num_rows}{end}\n\n")


@dataclass(frozen=True)
class Qwen2Audio:
    """Qwen2-Audio: a row for 40 ms of a sound."""

    token: str
    frame: int
    """Samples of a frame of the processor's."""
    rate: int
    """Samples of a second."""
    longest: int
    """Seconds of a sound, at most. The processor would cut longer ones without a word."""
    kind: ClassVar = MEDIA_KIND_AUDIO
    option_names: ClassVar[frozenset[str]] = frozenset()
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, sounds: Entries) -> "Qwen2Audio":
        rate = sounds.number("sampling_rate", 16_000)
        return cls(token, sounds.number("hop_length", 160), rate, sounds.number("chunk_length", 30))

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        if size.samples > self.longest * self.rate:
            raise ValueError(f"it lasts {size.samples / self.rate:.2f} s, and {self.longest} s are the most")
        frames = -(-size.samples // self.frame)
        halved = (frames - 1) // 2 + 1  # by a convolution, and then by pooling
        return MediaText(self.token * ((halved - 2) // 2 + 1))

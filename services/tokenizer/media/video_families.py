"""Families of models that are shown videos: which frames they see, how many tokens stand for these, and how they are
written.

Qwen2-VL and Qwen2.5-VL see all frames in one run of rows, and know their times by rotary positions; from Qwen3-VL on
each pair of frames has its time as text before it. Rounding, and the order of operations on floating point numbers, is
that of the video processors of transformers.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.types_pb2 import MEDIA_KIND_VIDEO

from .families import scaled_grid
from .media_text import OPTIONS_FIELD, Entries, MediaText, ShownMedia, option

DEFAULT_RATE = 2.0
"""Frames in a second that are shown where the checkpoint does not say: as Qwen's own ``qwen-vl-utils`` has it."""
LISTED_RATE = 1.0
"""Pictures of a list in a second, as vLLM counts them."""
_OPTIONS = frozenset({"fps", "num_frames", "min_pixels", "max_pixels"})
_MOST_RATE = 1000
MAX_ROWS = 1 << 18
"""Of a video: more than any context holds, and few enough that their text is written."""


@dataclass(frozen=True)
class FrameChoice:
    """Says how many frames a checkpoint's model is shown."""

    rate: float
    """In a second."""
    count: int | None
    """Of any video; None: as many as ``rate`` says."""
    least: int
    most: int

    @classmethod
    def read(cls, videos: Entries) -> "FrameChoice":
        count = videos.number("num_frames") if "num_frames" in videos else None
        rate = videos.positive("fps", DEFAULT_RATE)
        return cls(rate, count, videos.number("min_frames", 4), videos.number("max_frames", 768))

    def of(self, video: ShownMedia) -> "FrameChoice | None":
        """Return the choice for one video, with the client's options; None: all frames are shown. Raises
        ``InvalidArgument`` for options that exclude each other, or ask for more than the model's most."""
        rate, count = video.options.get("fps"), video.options.get("num_frames")
        if rate is not None and count is not None:
            name = f"{OPTIONS_FIELD}.fps"
            raise InvalidArgument(f"{name} and {OPTIONS_FIELD}.num_frames exclude each other", name)
        if count is not None:
            return FrameChoice(0.0, option(video, "num_frames", 1, 1, self.most), self.least, self.most)
        if rate is not None:
            if not rate <= _MOST_RATE:
                raise InvalidArgument(f"{OPTIONS_FIELD}.fps must be at most {_MOST_RATE}", f"{OPTIONS_FIELD}.fps")
            return FrameChoice(float(rate), None, self.least, self.most)
        return None if not video.rate and video.frames <= self.most else self


def _rate(video: ShownMedia) -> float:
    return video.rate or LISTED_RATE


def _num_rows(grid: tuple[int, int, int]) -> int:
    """Return the rows of a grid. Raises ``ValueError`` for too many."""
    if (count := math.prod(grid)) > MAX_ROWS:
        raise ValueError(f"it makes {count:,} tokens, of {grid[0]} x {grid[1]} x {grid[2]} squares of its frames")
    return count


def _plan(frames: Sequence[int], height: int, width: int) -> bytes:
    """Return what the encoder has to know: canonical, as it is part of the key of the rows."""
    return json.dumps({"frames": list(frames), "height": height, "width": width}, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Qwen2Video:
    """Qwen2-VL and Qwen2.5-VL: each frame has as many rows as an image of its size."""

    token: str
    choice: FrameChoice
    side: int
    """Pixels of a row's square."""
    depth: int
    """Frames of a row."""
    least: int
    most: int
    """Pixels of a frame, after it is scaled."""
    budget: int | None
    """Pixels of all frames together, of which each gets its share; None: there is no limit."""
    times: float | None
    """Rotary positions in a second; None: from one row's frames to the next it is one."""
    kind: ClassVar = MEDIA_KIND_VIDEO
    option_names: ClassVar[frozenset[str]] = _OPTIONS
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, config: Entries, videos: Entries) -> "Qwen2Video":
        size = videos.part("size")
        least, most = size.number("shortest_edge", 128 * 28 * 28), size.number("longest_edge", 28 * 28 * 768)
        side = videos.number("patch_size", 14) * videos.number("merge_size", 2)
        budget = None
        if videos.flag("cap_pixels_per_frame", default=False):
            budget = int(videos.number("max_video_tokens", 128_000) * side * side * 0.9)
        times = None
        if config.text("model_type") == "qwen2_5_vl":
            times = config.part("vision_config").positive("tokens_per_second", 4.0)
        return cls(
            token,
            FrameChoice.read(videos),
            side,
            videos.number("temporal_patch_size", 2),
            videos.number("min_pixels", least),
            videos.number("max_pixels", most),
            budget,
            times,
        )

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        frames = self._frames(size)
        least, most = _bounds(size, self.least, self.most)
        if self.budget is not None:
            most = max(min(most, self.budget * self.depth // len(frames)), int(least * 1.05))
        lines, columns = scaled_grid(size.width, size.height, self.side, least, most)
        grid = (-(-len(frames) // self.depth), lines, columns)
        plan = _plan(frames, lines * self.side, columns * self.side)
        return MediaText(self.token * _num_rows(grid), grid, self._step(size, len(frames)), plan)

    def _frames(self, video: ShownMedia) -> Sequence[int]:
        """Return the indices of the frames that are shown."""
        total, choice = video.frames, self.choice.of(video)
        if choice is None or total < self.depth:
            return range(total)
        if choice.count is not None:
            number = max(1, round(choice.count / self.depth)) * self.depth
            if number > total:
                raise ValueError(f"it has {total} frames, and {number} of them are asked for")
        else:
            most = math.floor(min(choice.most, total) / self.depth) * self.depth
            wanted = min(max(total / _rate(video) * choice.rate, choice.least), most, total)
            number = max(1, math.floor(wanted / self.depth)) * self.depth
        return _spread(total, number)

    def _step(self, video: ShownMedia, num_frames: int) -> float:
        """Return the rotary positions from one row's frames to the next, as a float32 number."""
        if self.times is None:
            return 0.0
        seconds = self.depth / (num_frames / video.frames * _rate(video))
        return _float32(_float32(seconds) * self.times)


@dataclass(frozen=True)
class Qwen3Video:
    """Qwen3-VL and Qwen 3.5: a video has a number of pixels altogether, and each row's frames have their time."""

    token: str
    begin: str
    end: str
    choice: FrameChoice
    side: int
    depth: int
    least: int
    most: int
    """Pixels of all frames, after they are scaled."""
    tokens_of_frame: int | None
    """Rows of a frame, at most; None: there is no limit."""
    kind: ClassVar = MEDIA_KIND_VIDEO
    option_names: ClassVar[frozenset[str]] = _OPTIONS
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, begin: str, end: str, videos: Entries) -> "Qwen3Video":
        size = videos.part("size")
        least, most = size.number("shortest_edge", 128 * 32 * 32), size.number("longest_edge", 32 * 32 * 768)
        side = videos.number("patch_size", 16) * videos.number("merge_size", 2)
        is_capped = videos.flag("cap_pixels_per_frame", default=False)
        return cls(
            token,
            begin,
            end,
            FrameChoice.read(videos),
            side,
            videos.number("temporal_patch_size", 2),
            least,
            most,
            videos.number("max_video_tokens", 768) if is_capped else None,
        )

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        frames = self._frames(size)
        lines, columns = self._grid(size, len(frames))
        grid = (-(-len(frames) // self.depth), lines, columns)
        rows = f"{self.begin}{self.token * (_num_rows(grid) // grid[0])}{self.end}"
        text = "".join(f"<{time:.1f} seconds>{rows}" for time in self._times(frames, _rate(size)))
        return MediaText(text, grid, 0.0, _plan(frames, lines * self.side, columns * self.side))

    def _frames(self, video: ShownMedia) -> Sequence[int]:
        total, choice = video.frames, self.choice.of(video)
        if choice is None:
            return range(total)
        number = choice.count
        if number is None:
            number = min(max(int(total / _rate(video) * choice.rate), choice.least), choice.most, total)
        step = (total - 1) / max(number - 1, 1)
        return [round(index * step) for index in range(number - 1)] + [total - 1 if number > 1 else 0]

    def _times(self, frames: Sequence[int], rate: float) -> list[float]:
        """Return the time of each row's frames in seconds: the middle between the first and the last of them."""
        padded = [*frames, *[frames[-1]] * (-len(frames) % self.depth)]
        times = [index / rate for index in padded]
        last = self.depth - 1
        return [(times[place] + times[place + last]) / 2 for place in range(0, len(times), self.depth)]

    def _grid(self, video: ShownMedia, num_frames: int) -> tuple[int, int]:
        side, width, height = self.side, video.width, video.height
        least, most = _bounds(video, self.least, self.most)
        if self.tokens_of_frame is not None:
            share = max(min(self.tokens_of_frame * side * side, most // num_frames), int(least * 1.05))
            most = share * num_frames
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        shown = max(self.depth, round(num_frames / self.depth) * self.depth)
        return scaled_grid(width, height, side, least, most, shown=shown, frames=max(num_frames, self.depth))


def _bounds(video: ShownMedia, least: int, most: int) -> tuple[int, int]:
    """Return the least and the most pixels, with the client's options."""
    most = option(video, "max_pixels", most, 1, most)
    return option(video, "min_pixels", min(least, most), 1, most), most


def _spread(total: int, number: int) -> list[int]:
    """Return ``number`` of ``total`` indices at equal distances, from 0 on; one more where rounding leaves room for it,
    as ``torch.arange`` does."""
    step = total / number
    return [int(_float32(index * step)) for index in range(math.ceil(total / step))]


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)

"""Families of models that are shown videos: which frames they see, how many tokens stand for these, and how they are
written.

Qwen2-VL and Qwen2.5-VL see all frames in one run of rows, and know their times by rotary positions; from Qwen3-VL on
each pair of frames has its time as text before it. To LLaVA-OneVision, InternVL, SmolVLM and Gemma 4 each frame is an
image of one size; the last two read its time. Rounding, and the order of operations on floating point numbers, is that
of the video processors of transformers.
"""

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar

from tokenloom.request.errors import InvalidArgument
from tokenloom.v1.types_pb2 import MEDIA_KIND_VIDEO

from .families import Gemma4, scaled_grid
from .media_text import OPTIONS_FIELD, Entries, MediaText, ShownMedia, clock, in_words, option

DEFAULT_RATE = 2.0
"""Frames in a second that are shown where the checkpoint does not say: as Qwen's own ``qwen-vl-utils`` has it."""
LISTED_RATE = 1.0
"""Pictures of a list in a second, as vLLM counts them."""
_OPTIONS = frozenset({"fps", "num_frames", "min_pixels", "max_pixels"})
_FRAME_OPTIONS = frozenset({"fps", "num_frames"})
_MOST_RATE = 1000
_MOST_USUAL = 768
USUAL_FRAMES = 32
"""That are shown of a video where the checkpoint does not say: as LLaVA's own tools and vLLM have it."""
MOST_FRAMES = 128
"""A client may ask for, where each is an image: the tower computes all of them at once."""
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
        rate, count = _asked(video, self.most)
        if count is not None:
            return FrameChoice(0.0, count, self.least, self.most)
        if rate is not None:
            return FrameChoice(rate, None, self.least, self.most)
        return None if not video.rate and video.frames <= self.most else self


def _asked(video: ShownMedia, most: int, *, both: bool = False) -> tuple[float | None, int | None]:
    """Return how many frames of a second, and how many at all, a client asks for. ``both``: whether it may say both.
    Raises ``InvalidArgument``."""
    rate, count = video.options.get("fps"), video.options.get("num_frames")
    name = f"{OPTIONS_FIELD}.fps"
    if rate is not None and count is not None and not both:
        raise InvalidArgument(f"{name} and {OPTIONS_FIELD}.num_frames exclude each other", name)
    if rate is not None and not 0 < rate <= _MOST_RATE:
        raise InvalidArgument(f"{name} must be above 0 and at most {_MOST_RATE}", name)
    return None if rate is None else float(rate), None if count is None else option(video, "num_frames", 1, 1, most)


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
            _check_number(number, total)
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


@dataclass(frozen=True)
class FewFrames:
    """Says how many frames are shown of a video, each as an image."""

    usual: int
    """Where a client does not say."""
    most: int

    def number(self, video: ShownMedia) -> int:
        """Return it. Raises ``ValueError`` if a video has less than a client asks for, and ``InvalidArgument``."""
        rate, count = _asked(video, self.most)
        if count is not None:
            return _check_number(count, video.frames)
        if rate is not None:
            count = max(1, int(video.frames / _rate(video) * rate))
        return min(count or (self.usual if video.rate else self.most), self.most, video.frames)


def few_frames(videos: Entries) -> FewFrames:
    """Return what a checkpoint's processor of videos says."""
    usual = min(videos.number("num_frames", USUAL_FRAMES), _MOST_USUAL)
    return FewFrames(usual, max(usual, MOST_FRAMES))


def _check_number(number: int, total: int) -> int:
    if number > total:
        raise ValueError(f"it has {total} frames, and {number} of them are asked for")
    return number


def _evenly(total: int, number: int) -> list[int]:
    return [index * total // number for index in range(number)]


@dataclass(frozen=True)
class OneVisionVideo:
    """LLaVA-OneVision: fewer rows for each frame than for an image, and one more behind all."""

    token: str
    choice: FewFrames
    rows: int
    """Of a frame."""
    size: tuple[int, int]
    """Height and width to which frames are scaled."""
    kind: ClassVar = MEDIA_KIND_VIDEO
    option_names: ClassVar[frozenset[str]] = _FRAME_OPTIONS
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, config: Entries, videos: Entries, processor: Entries) -> "OneVisionVideo":
        size = videos.side("size", 384)
        side = size[0] // config.part("vision_config").number("patch_size", 14)
        pooled = -(-math.isqrt(processor.number("num_image_tokens", side**2)) // 2)
        return cls(token, few_frames(videos), pooled**2, size)

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        frames = _evenly(size.frames, self.choice.number(size))
        return MediaText(self.token * (len(frames) * self.rows + 1), options_json=_plan(frames, *self.size))


@dataclass(frozen=True)
class InternVLVideo:
    """InternVL: each frame is an image of one tile with its number before it."""

    token: str
    begin: str
    end: str
    choice: FewFrames
    rows: int
    """Of a frame."""
    size: tuple[int, int]
    """Height and width to which frames are scaled."""
    shift: float | None
    """The first frame; None: from the middle of its part of the video on."""
    mark: ClassVar[str] = "<video>"
    kind: ClassVar = MEDIA_KIND_VIDEO
    option_names: ClassVar[frozenset[str]] = _FRAME_OPTIONS
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, begin: str, end: str, rows: int, videos: Entries) -> "InternVLVideo":
        """``rows``: of a frame."""
        size, shift = videos.side("size", 384), videos.amount("initial_shift")
        return cls(token, begin, end, few_frames(videos), rows, size, shift)

    def text(self, size: ShownMedia, count: int) -> MediaText:
        total, number = size.frames, self.choice.number(size)
        shift = total / number / 2 if self.shift is None else self.shift
        frames = _spread(total, number, shift)
        if not frames:
            raise ValueError(f"it has {total} frames, and the first that is shown is at {shift:g}")
        rows = f"{self.begin}{self.token * self.rows}{self.end}"
        text = "\n".join(f"Frame{place}: {rows}" for place in range(1, len(frames) + 1))
        return MediaText(text, options_json=_plan(frames, *self.size))


@dataclass(frozen=True)
class Gemma4Video:
    """Gemma 4: each frame is an image of few rows with its time before it."""

    frame: Gemma4
    """How it writes one; its token is that of videos."""
    choice: FewFrames
    kind: ClassVar = MEDIA_KIND_VIDEO
    option_names: ClassVar[frozenset[str]] = _FRAME_OPTIONS | {"max_soft_tokens"}
    depends_on_count: ClassVar[bool] = False

    @property
    def token(self) -> str:
        return self.frame.token

    @property
    def mark(self) -> str:
        return self.token

    def text(self, size: ShownMedia, count: int) -> MediaText:
        frames = _evenly(size.frames, self.choice.number(size))
        lines, columns = (length * self.frame.side for length in self.frame.grid(size))
        rows = self.frame.text(size, count).text
        text = " ".join(f"{clock(frame / _rate(size))} {rows}" for frame in frames)
        return MediaText(text, options_json=_plan(frames, lines, columns))


@dataclass(frozen=True)
class SmolVideo:
    """SmolVLM: a sentence about the video, and each frame as an image that is not cut, with its time before it."""

    token: str
    rows: int
    """Of a frame."""
    side: int
    """Pixels of a frame's side."""
    rate: float
    """Frames of a second that are shown."""
    most: int
    """Frames of a video, where a client does not say."""
    mark: ClassVar[str] = "<video>"
    kind: ClassVar = MEDIA_KIND_VIDEO
    option_names: ClassVar[frozenset[str]] = _FRAME_OPTIONS
    depends_on_count: ClassVar[bool] = False

    @classmethod
    def read(cls, token: str, videos: Entries, processor: Entries) -> "SmolVideo":
        sampling = videos.part("video_sampling")
        return cls(
            token,
            processor.number("image_seq_len", 169),
            videos.part("max_image_size").number("longest_edge", 364),
            sampling.positive("fps", videos.positive("fps", 1.0)),
            min(sampling.number("max_frames", videos.number("num_frames", 64)), MOST_FRAMES),
        )

    def text(self, size: ShownMedia, count: int) -> MediaText:
        frames, rate, around = self._frames(size), _rate(size), "<fake_token_around_image>"
        shown = f"{in_words(len(frames))} frames from a {timedelta(seconds=int(size.frames / rate))} [H:MM:SS] video"
        head = f"You are provided the following series of {shown}.\n"
        image = f"{around}<global-img>{self.token * self.rows}{around}"
        text = "".join(f"\nFrame from {clock(frame / rate)}:{image}" for frame in frames)
        return MediaText(f"{head}{text}\n\n", options_json=_plan(frames, self.side, self.side))

    def _frames(self, video: ShownMedia) -> list[int]:
        """Return the indices of the frames that are shown. Of a long video the first and the last second are not."""
        rate, most = _asked(video, MOST_FRAMES, both=True)
        if rate is None and most is None and not video.rate and video.frames <= MOST_FRAMES:
            return list(range(video.frames))
        rate, most = self.rate if rate is None else rate, most or self.most
        own, last = _rate(video), video.frames - 1
        seconds = video.frames / own
        number, first, end = max(min(round(rate * seconds), most), 1), 0, last
        if seconds - 2 > most * rate:
            first, end = int(own), min(int(video.frames - own), last)
            first, end = (first, end) if first < end else (0, last)
        step = (end - first) / max(number - 1, 1)
        inner = [int(index * step + first) for index in range(number - 1)]
        return sorted({*inner, end if number > 1 else first})


def _bounds(video: ShownMedia, least: int, most: int) -> tuple[int, int]:
    """Return the least and the most pixels, with the client's options."""
    most = option(video, "max_pixels", most, 1, most)
    return option(video, "min_pixels", min(least, most), 1, most), most


def _spread(total: int, number: int, first: float = 0.0) -> list[int]:
    """Return ``number`` of ``total`` indices at equal distances, from ``first`` on; one more where rounding leaves room
    for it, as ``torch.arange`` does."""
    step = total / number
    return [int(_float32(first + index * step)) for index in range(max(math.ceil((total - first) / step), 0))]


def _float32(value: float) -> float:
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)

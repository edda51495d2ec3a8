"""Turns files into what a tower computes, with the image processors of transformers that need neither torch nor
torchvision."""

import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from PIL import Image

from .image_file import FORMATS, MAX_PIXELS, BadImage, read_image
from .video_file import USUAL_LIMITS, BadVideo, VideoLimits, read_frames

Pixels = dict[str, npt.NDArray[Any]]
"""What a processor returns, by the name of the tower's argument. The first dimension of ``pixel_values`` counts images,
or in some families their patches."""
OPTIONS = frozenset({"min_pixels", "max_pixels", "crop_to_patches", "min_patches", "max_patches", "max_soft_tokens"})
"""What a request may change; everything else is the checkpoint's."""
_BOUNDS = frozenset({"min_pixels", "max_pixels"})
_CROPS = "crop_to_patches"
_NESTED = ("Idefics3", "SmolVLM", "LlavaOnevision")
"""Their processors take a list of images for each prompt."""
_COUNTS_IMAGES = "LlavaOnevision"
"""Its processor cuts only an image that is alone in its prompt."""
_QWEN_IMAGES = "Qwen2VL"
"""The processor of images of Qwen's models, all of which are shown videos: frames are cut into the same patches."""
_LONGEST_FIRST = 4096
"""Pixels of a frame's longer side, which SmolVLM's processor never exceeds."""
MAX_FRAMES = 4096
"""Of a video that are shown."""
MAX_BYTES = 1 << 30
"""Of a video's patches."""
_MAX_SIDE = 1 << 15


class Processor:
    """Prepares the images of one checkpoint."""

    def __init__(self, path: Path) -> None:
        """Read the checkpoint's settings. Raises ``ValueError`` or ``OSError`` if it has none that can be used."""
        load: Any = transformers.AutoImageProcessor.from_pretrained
        self._images = load(path, backend="pil", local_files_only=True, trust_remote_code=False)
        name = type(self._images).__name__
        if not name.endswith("Pil"):
            raise ValueError(f"the image processor {name} needs torchvision")
        self._is_nested, self._counts_images = name.startswith(_NESTED), name.startswith(_COUNTS_IMAGES)
        self._settings = _settings_of_whole(path, name)
        self._videos = _frames_of(path, name)

    @property
    def reads_videos(self) -> bool:
        """Whether the model is shown videos."""
        return self._videos is not None

    def warm_up(self) -> None:
        """Import what the first image needs."""
        for kind in FORMATS:
            data = io.BytesIO()
            Image.new("RGB", (64, 64)).save(data, kind)
            self.pixels(data.getvalue())

    def pixels(
        self, data: bytes, options: Mapping[str, Any] | None = None, *, num_in_prompt: int = 1,
        max_pixels: int = MAX_PIXELS,
    ) -> Pixels:  # fmt: skip
        """Return what the tower needs of an image file.

        ``options``: those of a request, of :data:`OPTIONS`. ``num_in_prompt``: images in its prompt. Raises
        :class:`.BadImage` for a file or an option that is refused.
        """
        options = dict(options or {})
        if unknown := options.keys() - OPTIONS:
            raise BadImage(f"mm_processor_kwargs: {', '.join(sorted(unknown))} cannot be set.")
        for name, value in options.items():  # transformers refuses another type by errors of its own kind
            if type(value) is not (bool if name == _CROPS else int):
                raise BadImage(f"mm_processor_kwargs: {name} is of another type.")
        if options.keys() & _BOUNDS:
            options["size"] = self._bounds(options.pop("min_pixels", None), options.pop("max_pixels", None))
        image = read_image(data, max_pixels)
        given: Any = image
        if self._is_nested:
            # Another picture in the prompt matters, and which one it is does not.
            given = [[image, image] if self._counts_images and num_in_prompt > 1 else [image]]
        try:
            values = self._images(given, return_tensors="np", **(self._settings | options))
        except (ValueError, TypeError, ZeroDivisionError) as error:
            raise BadImage(f"The model's processor refuses the image: {str(error)[:300]}") from error
        pixels = {name: np.ascontiguousarray(value) for name, value in values.items()}
        if self._counts_images and num_in_prompt > 1:
            pixels = {name: value[:1] for name, value in pixels.items()}
        return pixels

    def _bounds(self, least: int | None, most: int | None) -> dict[str, int]:
        """Return the option that sets the pixels of an image, of which the two that clients know are to leave
        transformers. What a client does not set is the checkpoint's, as far as that is possible. Raises
        :class:`.BadImage` if the checkpoint has no such bounds."""
        own_least, own_most = (getattr(self._images.size, f"{edge}_edge", None) for edge in ("shortest", "longest"))
        if own_least is None or own_most is None:
            raise BadImage("mm_processor_kwargs: this model has no min_pixels and max_pixels.")
        most = most or own_most
        return {"shortest_edge": least or min(own_least, most), "longest_edge": most}

    def frames(
        self, data: bytes, plan: Mapping[str, Any], *, limits: VideoLimits = USUAL_LIMITS, max_bytes: int = MAX_BYTES
    ) -> Pixels:
        """Return what the tower needs of a video. ``plan``: which frames, and the size to which they are scaled, as
        ``options_json`` of their item has it. ``max_bytes``: of what is returned. Raises :class:`.BadVideo` for a file
        or a plan that is refused."""
        if self._videos is None:
            raise BadVideo("This model is shown no videos.")
        indices, height, width = _read_plan(plan)
        return self._videos.pixels(read_frames(data, indices, limits), len(indices), (height, width), max_bytes)


@dataclass(frozen=True)
class FrameColours:
    """Says how frames are scaled, and how their bytes become numbers.

    Attributes:
        factor: On each byte, before the mean is taken off.
        mean, deviation: [3], of red, green and blue.
        resample: How Pillow computes the pixels of another size.
    """

    factor: float
    mean: npt.NDArray[np.float32]
    deviation: npt.NDArray[np.float32]
    resample: Image.Resampling

    @classmethod
    def read(cls, settings: Mapping[str, Any], defaults: "_Defaults") -> "FrameColours":
        """Read the settings of a checkpoint's processor. Raises ``ValueError`` or ``TypeError`` for those that are not
        known."""
        for name in ("do_resize", "do_rescale"):  # do_convert_rgb changes nothing: frames are RGB
            if not settings.get(name, True):
                raise ValueError(f"videos are prepared without {name}, which is not known")
        if settings.get("do_center_crop"):
            raise ValueError("videos are prepared with do_center_crop, which is not known")
        mean = settings.get("image_mean") or defaults.colours[0]
        deviation = settings.get("image_std") or defaults.colours[1]
        if not settings.get("do_normalize", True):
            mean, deviation = _RAW_COLOURS
        resample = settings.get("resample")
        return cls(
            float(settings.get("rescale_factor") or 1 / 255),
            np.array(mean, np.float32),
            np.array(deviation, np.float32),
            Image.Resampling(defaults.resample if resample is None else resample),
        )

    def scaled(self, frame: Image.Image, size: tuple[int, int]) -> Image.Image:
        """Return a frame of ``size`` [height, width]."""
        return frame.resize((size[1], size[0]), self.resample)

    def numbers(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Return what the tower gets for pixels [..., 3]."""
        values: npt.NDArray[np.float32] = (pixels * np.float32(self.factor) - self.mean) / self.deviation
        return values


class FramePatches:
    """Cuts the frames of a video into patches, as the video processors of Qwen's models do, which need torchvision."""

    def __init__(self, settings: Mapping[str, Any], defaults: "_Defaults") -> None:
        """``settings``: those of the checkpoint's processor. Raises as :meth:`FrameColours.read`."""
        self._colours = FrameColours.read(settings, defaults)
        self._depth = int(settings.get("temporal_patch_size") or 2)
        self._patch = int(settings.get("patch_size") or defaults.patch)
        self._merge = int(settings.get("merge_size") or 2)

    def pixels(self, frames: Iterator[Image.Image], count: int, size: tuple[int, int], max_bytes: int) -> Pixels:
        """Return the patches of ``count`` frames, scaled to ``size`` [height, width]. Raises :class:`.BadVideo` for a
        size that is not made of whole squares, and for too many patches."""
        groups = -(-count // self._depth)
        _check_squares(size, self._patch * self._merge)
        lines, columns = size[0] // self._patch, size[1] // self._patch
        patches = _room((groups, lines * columns, 3 * self._depth * self._patch**2), max_bytes)
        group = list[npt.NDArray[np.uint8]]()
        for place in range(groups):
            group = [np.asarray(self._colours.scaled(frame, size)) for frame in itertools.islice(frames, self._depth)]
            group += group[-1:] * (self._depth - len(group))  # the last frame fills up the last group
            patches[place] = self._cut(np.stack(group), lines, columns)
        grid = np.array([[groups, lines, columns]], np.int64)
        return {"pixel_values": patches.reshape(-1, patches.shape[2]), "image_grid_thw": grid}

    def _cut(self, frames: npt.NDArray[np.uint8], lines: int, columns: int) -> npt.NDArray[np.float32]:
        """Return the patches [lines * columns, numbers] of frames [depth, height, width, 3], square by square."""
        values, merge, patch = self._colours.numbers(frames), self._merge, self._patch
        values = values.reshape(len(frames), lines // merge, merge, patch, columns // merge, merge, patch, 3)
        return values.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(lines * columns, -1)


class WholeFrames:
    """Scales the frames of a video for the towers to which each frame is an image: those of LLaVA-OneVision, InternVL
    and SmolVLM."""

    def __init__(self, settings: Mapping[str, Any], defaults: "_Defaults", kind: str) -> None:
        """``kind``: the ``model_type`` of ``config.json``. Raises as :meth:`FrameColours.read`."""
        self._colours = FrameColours.read(settings, defaults)
        self._kind = kind
        sampling = settings.get("video_sampling") or {}
        size = settings.get("size") or sampling.get("video_size") or {"longest_edge": 4 * 364}
        # SmolVLM's processor scales a frame twice, as that of images does for an image that it does not cut.
        self._first = min(int(size.get("longest_edge") or 0), _LONGEST_FIRST) if kind == "smolvlm" else 0

    def pixels(self, frames: Iterator[Image.Image], count: int, size: tuple[int, int], max_bytes: int) -> Pixels:
        """Return ``count`` frames, scaled to ``size`` [height, width]. Raises :class:`.BadVideo` for too many."""
        values = _room((count, 3, *size), max_bytes)
        for place, frame in enumerate(frames):
            if self._first:
                frame = self._colours.scaled(frame, _fitted(frame.size, self._first))
            values[place] = self._colours.numbers(np.asarray(self._colours.scaled(frame, size))).transpose(2, 0, 1)
        match self._kind:
            case "llava_onevision":  # whose tower joins the rows of frames, and adds one for the video
                return {"pixel_values_videos": values[None]}
            case "smolvlm":
                return {"pixel_values": values[None]}
        return {"pixel_values": values}


class FramesOfRows:
    """Cuts the frames of a video into patches as Gemma 4 does: each frame is an image of whole squares."""

    def __init__(self, settings: Mapping[str, Any], defaults: "_Defaults") -> None:
        """Raises as :meth:`FrameColours.read`."""
        self._colours = FrameColours.read(settings, defaults)
        self._patch = int(settings.get("patch_size") or defaults.patch)
        self._pooled = int(settings.get("pooling_kernel_size") or 3)

    def pixels(self, frames: Iterator[Image.Image], count: int, size: tuple[int, int], max_bytes: int) -> Pixels:
        """Return the patches of ``count`` frames, scaled to ``size`` [height, width]. Raises :class:`.BadVideo` for a
        size that is not made of whole squares, and for too many patches."""
        _check_squares(size, self._patch * self._pooled)
        patch, (lines, columns) = self._patch, (size[0] // self._patch, size[1] // self._patch)
        patches = _room((count, lines * columns, 3 * patch**2), max_bytes)
        for place, frame in enumerate(frames):
            values = self._colours.numbers(np.asarray(self._colours.scaled(frame, size)))
            values = values.reshape(lines, patch, columns, patch, 3).transpose(0, 2, 1, 3, 4)
            patches[place] = values.reshape(lines * columns, -1)
        places = np.stack(np.meshgrid(np.arange(columns), np.arange(lines)), axis=-1).reshape(1, -1, 2)
        return {
            "pixel_values_videos": patches,
            "video_position_ids": np.ascontiguousarray(places.repeat(count, axis=0), np.int64),
            "num_frames_per_video": np.array([count], np.int64),
        }


@dataclass(frozen=True)
class _Defaults:
    """What a processor of videos takes where the checkpoint's files say nothing."""

    colours: tuple[Sequence[float], Sequence[float]]
    """The means and the deviations."""
    resample: Image.Resampling = Image.Resampling.BICUBIC
    patch: int = 16


_CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_EVEN_COLOURS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_RAW_COLOURS = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
_OF_QWEN_2, _OF_QWEN_3 = _Defaults(_CLIP_COLOURS, patch=14), _Defaults(_EVEN_COLOURS)
_WHOLE_FRAMES = {
    "llava_onevision": _Defaults(_CLIP_COLOURS),
    "internvl": _Defaults(_CLIP_COLOURS),
    "smolvlm": _Defaults(_EVEN_COLOURS, Image.Resampling.LANCZOS),
}
"""By the ``model_type`` of ``config.json``."""


def _frames_of(path: Path, name: str) -> FramePatches | WholeFrames | FramesOfRows | None:
    """Return what prepares the videos of a checkpoint; None: its model is shown none. ``name``: the class that prepares
    its images. Raises ``ValueError`` for settings that are not known."""
    whole = _entries(path / "processor_config.json")
    settings = whole.get("video_processor") or _entries(path / "video_preprocessor_config.json")
    settings = settings or _entries(path / "preprocessor_config.json") or whole.get("image_processor") or {}
    kind = str(_entries(path / "config.json").get("model_type"))
    try:
        if name.startswith(_QWEN_IMAGES):
            return FramePatches(settings, _OF_QWEN_2 if kind.startswith("qwen2") else _OF_QWEN_3)
        if (defaults := _WHOLE_FRAMES.get(kind)) is not None:
            return WholeFrames(settings, defaults, kind)
        return FramesOfRows(settings, _Defaults(_RAW_COLOURS)) if kind == "gemma4" else None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"an entry of the processor of videos is of another type: {error}") from None


def _check_squares(size: tuple[int, int], side: int) -> None:
    if any(length % side for length in size):
        raise BadVideo(f"A frame of {size[1]} x {size[0]} pixels is not made of squares of {side}.")


def _room(shape: tuple[int, ...], max_bytes: int) -> npt.NDArray[np.float32]:
    """Return an array for the numbers of a video. Raises :class:`.BadVideo` for one that is too large."""
    if 4 * math.prod(shape) > max_bytes:
        raise BadVideo("The video has too many pixels once it is prepared.")
    return np.empty(shape, np.float32)


def _fitted(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the height and width of a frame of ``size`` [width, height] whose longer side becomes ``longest``; the
    other one becomes even."""
    width, height = size
    ratio = width / height
    shorter = int(longest / ratio) if width >= height else int(longest * ratio)
    shorter = max(shorter + shorter % 2, 1)
    return (shorter, longest) if width >= height else (longest, shorter)


def _read_plan(plan: Mapping[str, Any]) -> tuple[Sequence[int], int, int]:
    """Return the indices of frames, and the height and width to which they are scaled. Raises :class:`.BadVideo`."""
    indices, height, width = (plan.get(name, 0) for name in ("frames", "height", "width"))
    is_list = isinstance(indices, list) and 0 < len(indices) <= MAX_FRAMES
    if not is_list or any(type(each) is not int or each < 0 for each in indices) or sorted(indices) != indices:
        raise BadVideo(f"frames must name 1 to {MAX_FRAMES} frames by their indices, in order.")
    if any(type(side) is not int or not 0 < side <= _MAX_SIDE for side in (height, width)):
        raise BadVideo(f"height and width must be whole numbers from 1 to {_MAX_SIDE}.")
    return indices, height, width


def _settings_of_whole(path: Path, name: str) -> dict[str, Any]:
    """Return what the processor of the whole model sets when it calls that of images. ``name``: the latter's class."""
    if _entries(path / "config.json").get("model_type") == "internvl":
        return {"crop_to_patches": True}
    whole = _entries(path / "processor_config.json")
    if name.startswith("Pixtral") and (merge := whole.get("spatial_merge_size", 1)) > 1:
        side = merge * whole.get("patch_size", 16)
        return {"patch_size": {"height": side, "width": side}}
    return {}


def _entries(file: Path) -> dict[str, Any]:
    """Return the JSON object of a file; empty: there is none."""
    try:
        entries = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}

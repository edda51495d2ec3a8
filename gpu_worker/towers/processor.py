"""Turns files into what a tower computes, with the image processors of transformers that need neither torch nor
torchvision."""

import io
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
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
_NESTED = ("Idefics3", "SmolVLM", "LlavaOnevision")
"""Their processors take a list of images for each prompt."""
_COUNTS_IMAGES = "LlavaOnevision"
"""Its processor cuts only an image that is alone in its prompt."""
_SHOWN_VIDEOS = "Qwen2VL"
"""The processor of images of the families that are shown videos: their frames are cut into the same patches."""
MAX_FRAMES = 4096
"""Of a video that are shown."""
MAX_BYTES = 1 << 30
"""Of a video's patches."""
_MAX_SIDE = 1 << 15
_CLIP_COLOURS = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
_EVEN_COLOURS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


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
        self._videos = FramePatches.of_checkpoint(path) if name.startswith(_SHOWN_VIDEOS) else None

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

    def frames(
        self, data: bytes, plan: Mapping[str, Any], *, limits: VideoLimits = USUAL_LIMITS, max_bytes: int = MAX_BYTES
    ) -> Pixels:
        """Return what the tower needs of a video. ``plan``: which frames, and the size to which they are scaled, as
        ``options_json`` of their item has it. ``max_bytes``: of what is returned. Raises :class:`.BadVideo` for a file
        or a plan that is refused."""
        if self._videos is None:
            raise BadVideo("This model is shown no videos.")
        indices, height, width = _read_plan(plan)
        return self._videos.patches(read_frames(data, indices, limits), len(indices), (height, width), max_bytes)


class FramePatches:
    """Cuts the frames of a video into patches, as the video processors of Qwen's models do, which need torchvision."""

    def __init__(
        self, settings: Mapping[str, Any], colours: tuple[Sequence[float], Sequence[float]], patch: int
    ) -> None:
        """``settings``: those of the checkpoint's processor. ``colours``: the means and deviations where it states
        none; ``patch``: the side of a patch, likewise. Raises ``ValueError`` or ``TypeError`` for settings that are
        not known."""
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not settings.get(name, True):
                raise ValueError(f"videos are prepared without {name}, which is not known")
        self._depth = int(settings.get("temporal_patch_size") or 2)
        self._patch = int(settings.get("patch_size") or patch)
        self._merge = int(settings.get("merge_size") or 2)
        self._scale = float(settings.get("rescale_factor") or 1 / 255)
        self._mean = np.array(settings.get("image_mean") or colours[0], np.float32)
        self._deviation = np.array(settings.get("image_std") or colours[1], np.float32)
        self._resample = Image.Resampling(settings.get("resample") or Image.Resampling.BICUBIC)

    @classmethod
    def of_checkpoint(cls, path: Path) -> "FramePatches":
        """Return those of a checkpoint. The processor of images says what no other file does. Raises ``ValueError``."""
        found = _entries(path / "processor_config.json").get("video_processor")
        found = found or _entries(path / "video_preprocessor_config.json")
        is_second = str(_entries(path / "config.json").get("model_type")).startswith("qwen2")
        colours, patch = (_CLIP_COLOURS, 14) if is_second else (_EVEN_COLOURS, 16)
        try:
            return cls(found or _entries(path / "preprocessor_config.json"), colours, patch)
        except TypeError as error:
            raise ValueError(f"an entry of the processor of videos is of another type: {error}") from None

    def patches(self, frames: Iterator[Image.Image], count: int, size: tuple[int, int], max_bytes: int) -> Pixels:
        """Return the patches of ``count`` frames, scaled to ``size`` [height, width]. Raises :class:`.BadVideo` for a
        size that is not made of whole squares, and for too many patches."""
        square, groups = self._patch * self._merge, -(-count // self._depth)
        if any(length % square for length in size):
            raise BadVideo(f"A frame of {size[1]} x {size[0]} pixels is not made of squares of {square}.")
        lines, columns = size[0] // self._patch, size[1] // self._patch
        shape = (groups, lines * columns, 3 * self._depth * self._patch**2)
        if 4 * math.prod(shape) > max_bytes:
            raise BadVideo("The video has too many pixels once it is prepared.")
        patches, group = np.empty(shape, np.float32), list[npt.NDArray[np.uint8]]()
        for place in range(groups):
            group = [self._scaled(frame, size) for frame in itertools.islice(frames, self._depth)]
            group += group[-1:] * (self._depth - len(group))  # the last frame fills up the last group
            patches[place] = self._cut(np.stack(group), lines, columns)
        grid = np.array([[groups, lines, columns]], np.int64)
        return {"pixel_values": patches.reshape(-1, shape[2]), "image_grid_thw": grid}

    def _scaled(self, frame: Image.Image, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        return np.asarray(frame.resize((size[1], size[0]), self._resample))

    def _cut(self, frames: npt.NDArray[np.uint8], lines: int, columns: int) -> npt.NDArray[np.float32]:
        """Return the patches [lines * columns, numbers] of frames [depth, height, width, 3], square by square."""
        values = (frames * np.float32(self._scale) - self._mean) / self._deviation
        merge, patch = self._merge, self._patch
        values = values.reshape(len(frames), lines // merge, merge, patch, columns // merge, merge, patch, 3)
        return values.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(lines * columns, -1)


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

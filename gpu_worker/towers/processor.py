"""Turns files into what a tower computes, with the image processors of transformers that need neither torch nor
torchvision."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from PIL import Image

from .image_file import FORMATS, MAX_PIXELS, BadImage, read_image

Pixels = dict[str, npt.NDArray[Any]]
"""What a processor returns, by the name of the tower's argument. The first dimension of ``pixel_values`` counts images,
or in some families their patches."""
OPTIONS = frozenset({"min_pixels", "max_pixels", "crop_to_patches", "min_patches", "max_patches", "max_soft_tokens"})
"""What a request may change; everything else is the checkpoint's."""
_NESTED = ("Idefics3", "SmolVLM", "LlavaOnevision")
"""Their processors take a list of images for each prompt."""
_COUNTS_IMAGES = "LlavaOnevision"
"""Its processor cuts only an image that is alone in its prompt."""


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

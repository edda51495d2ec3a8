"""Families whose images all have the same number of rows: LLaVA and Gemma 3."""

from dataclasses import dataclass
from typing import ClassVar

from tokenloom.v1.types_pb2 import MEDIA_KIND_IMAGE

from .media_text import Entries, MediaText, ShownMedia


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

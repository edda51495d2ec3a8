"""Makes prompts with images for the checkpoints of ``whole_vision.py``, with rows from transformers' own towers, and
the tokens that the whole model generates: what a mesh, an engine or a tower is compared with."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers
from PIL import Image

from tests.checkpoints.whole_vision import FAMILIES, token_id
from tests.parity.identical import Case

KINDS_OF_TOKENS = {
    "gemma3": "token_type_ids",
    **dict.fromkeys(
        ("gemma4_e2b", "gemma4_26b_a4b", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"),
        "mm_token_type_ids",
    ),
}
"""What a processor calls the marks of tokens that are of an image, where ``generate`` asks for them."""
OF_PROCESSORS = ("rows", "cols", "num_patches", "num_crops", "num_soft_tokens_per_image")
"""What image processors return for the text alone."""
UNWRITTEN = [token_id(name) for name in ("<|image|>", "<|audio|>", "<|video|>")]
"""Gemma 4's whole class takes these for parts of the prompt, also where it has drawn them itself. No model that is
trained draws them."""
_TILE_ROWS = 16
"""Of a tile of Idefics 3 and SmolVLM."""


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return an image of 8 x 8 fields, each of a random colour."""
    fields = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(fields).resize((width, height), Image.Resampling.NEAREST)


@dataclass(frozen=True)
class Picture:
    """Holds the rows of one image of a prompt."""

    rows: npt.NDArray[np.float32]
    """[n, levels * hidden_size]: with deepstack, the levels of a row side by side."""
    places: list[int]
    """[n]: the tokens that they replace."""
    grid: tuple[int, int, int] = (0, 0, 0)
    """Frames, lines and columns of the rows, where rotary positions count them."""
    frame_step: float = 1.0
    """Rotary positions from a frame to the next."""

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """Return (position, number of tokens, first row) of each run of consecutive places."""
        runs: list[tuple[int, int, int]] = []
        for index, place in enumerate(self.places):
            if runs and sum(runs[-1][:2]) == place:
                position, count, offset = runs[-1]
                runs[-1] = position, count + 1, offset
            else:
                runs.append((place, 1, index))
        return runs


@dataclass(frozen=True)
class VisionPrompt:
    """Holds a prompt as the engine gets it, and as transformers' class does."""

    token_ids: list[int]
    pictures: list[Picture]
    inputs: dict[str, Any]
    """Of ``generate``, the token ids included."""


class VisionModel:
    """Computes prompts with the whole model of a checkpoint of ``write_whole_vision``."""

    def __init__(self, kind: str, path: Path, model: Any) -> None:
        """``model``: as :func:`tests.parity.vision_checkpoints.load_vision` returns it."""
        self.kind, self.model = kind, model
        self.model.generation_config.eos_token_id = None
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        self._images = transformers.AutoImageProcessor.from_pretrained(path)

    @torch.inference_mode()
    def prompt(self, images: Sequence[Image.Image], text: str = "What is this?") -> VisionPrompt:
        """Return a prompt that shows ``images`` and then asks."""
        pixels = self._pixels(images) if images else {}
        rows = self._rows(pixels) if images else []
        shown = " and ".join(self._expanded(pixels, index, len(each)) for index, each in enumerate(rows))
        ids = self._tokenizer(f"<s>Look: {shown} {text}")["input_ids"]
        image_id = token_id(FAMILIES[self.kind].image_token)
        places = [index for index, each in enumerate(ids) if each == image_id]
        assert len(places) == sum(map(len, rows)), (len(places), [each.shape for each in rows])
        pictures, taken = [], 0
        for index, each in enumerate(rows):
            pictures.append(Picture(each, places[taken : taken + len(each)], self._grid(pixels, index)))
            taken += len(each)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        if images and (name := KINDS_OF_TOKENS.get(self.kind)) is not None:
            inputs[name] = (inputs["input_ids"] == image_id).long()
        return VisionPrompt(ids, pictures, inputs | {key: pixels[key] for key in pixels if key not in OF_PROCESSORS})

    @torch.inference_mode()
    def generate(self, prompt: VisionPrompt, num_tokens: int) -> Case:
        """Return the tokens of the largest logits."""
        return generate_largest(
            self.model, prompt, num_tokens, suppress_tokens=UNWRITTEN if self.kind.startswith("gemma4") else None
        )

    def _pixels(self, images: Sequence[Image.Image]) -> dict[str, Any]:
        """Return what the image processor makes of the images, called as the family's own processor does."""
        options: dict[str, Any] = {"return_tensors": "pt"}
        if self.kind == "mistral3":
            options["patch_size"] = {"height": 28, "width": 28}  # a row is made of 2 x 2 patches
        elif self.kind == "internvl":
            options["crop_to_patches"] = True
        elif self.kind in ("idefics3", "smolvlm"):
            options["return_row_col_info"] = True
        listed = [list(images)] if self.kind in ("idefics3", "smolvlm") else list(images)
        return dict(self._images(listed, **options))

    def _rows(self, pixels: dict[str, Any]) -> list[npt.NDArray[np.float32]]:
        """Compute the rows of each image with the tower of the whole model."""
        body, config = self.model.model, self.model.config
        known = inspect.signature(body.get_image_features).parameters
        given = {name: value for name, value in pixels.items() if name in known}
        for name in ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"):
            if name in known:  # ``forward`` takes these from the configuration, this method not in every class
                given[name] = getattr(config, name)
        output = body.get_image_features(**given, return_dict=True)
        levels = [_joined(output.pooler_output), *map(_joined, getattr(output, "deepstack_features", None) or ())]
        counts = self._counts(pixels, output.pooler_output)
        rows: list[npt.NDArray[np.float32]] = [each.numpy() for each in torch.cat(levels, dim=1).split(counts)]
        return rows

    def _counts(self, pixels: dict[str, Any], features: Any) -> list[int]:
        """Return how many rows each image has."""
        if self.kind in ("idefics3", "smolvlm"):
            return [(rows * columns + 1) * _TILE_ROWS for rows, columns in _tiles(pixels)]
        if self.kind == "internvl":
            return [count * len(features[0]) for count in pixels["num_patches"].tolist()]
        if self.kind.startswith("gemma4"):
            return [int(count) for count in pixels["num_soft_tokens_per_image"]]
        return [each.reshape(-1, each.shape[-1]).shape[0] for each in features]

    def _grid(self, pixels: dict[str, Any], index: int) -> tuple[int, int, int]:
        if not self.kind.startswith("qwen"):
            return (0, 0, 0)
        merge = self.model.config.vision_config.spatial_merge_size
        frames, height, width = pixels["image_grid_thw"][index].tolist()
        return frames, height // merge, width // merge

    def _expanded(self, pixels: dict[str, Any], index: int, num_rows: int) -> str:
        """Return what stands for an image in the prompt, with a token for each of its rows."""
        family = FAMILIES[self.kind]
        match self.kind:
            case "idefics3" | "smolvlm":
                return _tiled(*_tiles(pixels)[index], "<image>" * _TILE_ROWS)
            case "pixtral" | "mistral3":
                side = 16 if self.kind == "pixtral" else 28
                height, width = (size // side for size in pixels["image_sizes"][index].tolist())
                return "[IMG_BREAK]".join(["[IMG]" * width] * height) + "[IMG_END]"
            case "gemma4_e2b" | "gemma4_26b_a4b":
                return "<|image>" + "<|image|>" * num_rows + "<image|>"
        return family.image_text.replace(family.image_token, family.image_token * num_rows)


def _flat(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1, rows.shape[-1])


def _joined(features: Any) -> torch.Tensor:
    """Return the rows of all images, which some classes return as one tensor and others as a list."""
    return torch.cat(list(map(_flat, features))) if isinstance(features, (list, tuple)) else _flat(features)


def _tiles(pixels: dict[str, Any]) -> list[tuple[int, int]]:
    """Return the rows and columns of tiles of each image; none: it is one tile."""
    return list(zip(*(each[0] for each in (pixels["rows"], pixels["cols"])), strict=True))


def _tiled(rows: int, columns: int, tile: str) -> str:
    """Return what stands for an image of so many tiles and, behind them, the whole image once more."""
    start, whole = "<fake_token_around_image>", "<global-img>"
    tiles = "".join(
        "".join(f"{start}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return (tiles + "\n" if tiles else "") + start + whole + tile + start


@torch.inference_mode()
def generate_largest(model: Any, prompt: VisionPrompt, num_tokens: int, **options: Any) -> Case:
    """Return the tokens of the largest logits. ``options``: of the whole model's ``generate``."""
    output = model.generate(
        **prompt.inputs,
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    tokens = output.sequences[0, len(prompt.token_ids) :].tolist()
    return Case(prompt.token_ids, tokens, torch.cat(output.logits).numpy())

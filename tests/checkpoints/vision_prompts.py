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
        pixels = dict(self._images(list(images), return_tensors="pt")) if images else {}
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
        return VisionPrompt(ids, pictures, inputs | pixels)

    @torch.inference_mode()
    def generate(self, prompt: VisionPrompt, num_tokens: int) -> list[int]:
        """Return the tokens of the largest logits."""
        output = self.model.generate(**prompt.inputs, max_new_tokens=num_tokens, do_sample=False, pad_token_id=0)
        tokens: list[int] = output[0, len(prompt.token_ids) :].tolist()
        return tokens

    def _rows(self, pixels: dict[str, Any]) -> list[npt.NDArray[np.float32]]:
        """Compute the rows of each image with the tower of the whole model."""
        body, config = self.model.model, self.model.config
        known = inspect.signature(body.get_image_features).parameters
        given = {name: value for name, value in pixels.items() if name in known}
        for name in ("vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"):
            if name in known:  # ``forward`` takes these from the configuration, this method not in every class
                given[name] = getattr(config, name)
        output = body.get_image_features(**given, return_dict=True)
        return [rows.reshape(-1, rows.shape[-1]).numpy() for rows in output.pooler_output]

    def _grid(self, pixels: dict[str, Any], index: int) -> tuple[int, int, int]:
        return (0, 0, 0)

    def _expanded(self, pixels: dict[str, Any], index: int, num_rows: int) -> str:
        """Return what stands for an image in the prompt, with a token for each of its rows."""
        family = FAMILIES[self.kind]
        return family.image_text.replace(family.image_token, family.image_token * num_rows)

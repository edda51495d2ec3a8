"""Makes prompts with videos for models to which each frame is an image of its own: what transformers' video processors
make of the frames, and the tokens that the whole model generates."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tests.checkpoints.video_prompts import Shown, prepare_video, video_processor_class
from tests.checkpoints.vision_prompts import Picture, VisionModel, VisionPrompt
from tests.checkpoints.whole_vision import FAMILIES, token_id
from tests.parity.identical import Case
from tokenloom.services.tokenizer.media.media_text import in_words

KINDS = ("llava_onevision", "internvl", "smolvlm", "gemma4_e2b", "gemma4_26b_a4b")
"""Families of ``whole_vision.py``."""
MARKS = {kind: "<|video|>" if kind.startswith("gemma4") else "<video>" for kind in KINDS}
"""What stands for a video before it is expanded."""
_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "llava_onevision": ("LlavaOnevisionProcessor", {"num_image_tokens": 16, "video_token": "<video>"}),
    "internvl": (
        "InternVLProcessor",
        {
            "image_seq_length": 4,
            "image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
        },
    ),
    "smolvlm": (
        "SmolVLMProcessor",
        {
            "image_seq_len": 16,
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
        },
    ),
    "gemma4": ("Gemma4Processor", {"video_token": "<|video|>", "boi_token": "<|image>", "eoi_token": "<image|>"}),
}
"""Of each family the class that writes videos, and what it has read of a checkpoint."""


def family_of(kind: str) -> str:
    """Return the module of transformers for a family of ``whole_vision.py``."""
    return "gemma4" if kind.startswith("gemma4") else kind


def writer_of(family: str, **attributes: Any) -> Any:
    """Return the processor of transformers that writes videos, without what it needs for anything else.
    ``attributes``: those that it has read of a checkpoint; those of ``whole_vision.py`` by default."""
    module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
    if family == "smolvlm":
        module.num2words = in_words  # a package that is not installed here; see the test of the function
    name, usual = _PROCESSORS[family]
    processor = object.__new__(getattr(module, name))
    for attribute, value in (usual | attributes).items():
        setattr(processor, attribute, value)
    return processor


class FrameModel:
    """Computes prompts with the whole model of a checkpoint of ``write_whole_vision``."""

    def __init__(self, kind: str, path: Path, model: Any) -> None:
        """``model``: as :func:`tests.parity.vision_checkpoints.load_vision` returns it."""
        self.kind, self.path, self.model = kind, path, model
        self._family = family_of(kind)
        self._vision = VisionModel(kind, path, model)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        is_own = self._is_gemma or kind == "llava_onevision"  # the others write frames with the token of images
        self._token = MARKS[kind] if is_own else FAMILIES[kind].image_token
        self._videos = video_processor_class(self._family)(**settings_of(path))
        self._writer = writer_of(self._family)

    @property
    def _is_gemma(self) -> bool:
        return self._family == "gemma4"

    def prompt(self, videos: Sequence[Shown], text: str = "What happens?", **options: Any) -> VisionPrompt:
        """Return a prompt that shows ``videos`` and then asks. ``options``: of the processor."""
        marks = " and ".join([MARKS[self.kind]] * len(videos))
        return self._prompt(f"<s>Look: {marks} {text}", videos, options)

    def chat(self, videos: Sequence[Shown], text: str, **options: Any) -> VisionPrompt:
        """Return the prompt of a turn that shows ``videos`` and then asks."""
        mark: dict[str, Any] = {"type": "video"}
        if self.kind == "smolvlm":  # whose template has no place for one
            mark = {"type": "text", "text": "<video>"}
        content = [*(mark for _ in videos), {"type": "text", "text": text}]
        turns = [{"role": "user", "content": content if videos else text}]
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self._prompt(rendered, videos, options)

    def generate(self, prompt: VisionPrompt, num_tokens: int) -> Case:
        """Return the tokens of the largest logits."""
        return self._vision.generate(prompt, num_tokens)

    @torch.inference_mode()
    def _prompt(self, rendered: str, videos: Sequence[Shown], options: dict[str, Any]) -> VisionPrompt:
        made = [prepare_video(self._videos, video, **options) for video in videos]
        first, *pieces = rendered.split(MARKS[self.kind])
        texts = (self._writer.replace_video_token(each, 0) for each in made)
        ids = self._tokenizer(first + "".join(map("".join, zip(texts, pieces, strict=True))))["input_ids"]
        places = [index for index, each in enumerate(ids) if each == token_id(self._token)]
        pictures, taken = [], 0
        for each in made:
            rows = self._rows(each)
            pictures.append(Picture(rows, places[taken : taken + len(rows)]))
            taken += len(rows)
        assert taken == len(places), (taken, len(places))
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        if made and self._is_gemma:
            inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == token_id(self._token)).long()
        return VisionPrompt(ids, pictures, inputs | (self._pixels(made) if made else {}))

    def _pixels(self, made: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return what the whole model gets of videos, as the processor joins what it made of each."""
        if self._family == "internvl":
            return {"pixel_values": torch.cat([each["pixel_values_videos"].flatten(0, 1) for each in made])}
        if self._family == "smolvlm":
            return {"pixel_values": torch.cat([each["pixel_values"] for each in made], dim=1)}
        names = ["pixel_values_videos"]
        if self._is_gemma:
            names += ["video_position_ids", "num_frames_per_video"]
        return {name: torch.cat([torch.as_tensor(each[name]) for each in made]) for name in names}

    def _rows(self, prepared: Any) -> npt.NDArray[np.float32]:
        """Compute the rows of a video with the tower of the whole model."""
        body, config, given = self.model.model, self.model.config, self._pixels([prepared])
        layer: dict[str, Any] = {}
        if self._family in ("llava_onevision", "internvl"):
            layer = {name: getattr(config, name) for name in _FROM_CONFIG}
        compute = body.get_video_features if "pixel_values_videos" in given else body.get_image_features
        output = compute(**given, **layer, return_dict=True).pooler_output
        rows = [each.reshape(-1, each.shape[-1]) for each in output]
        found: npt.NDArray[np.float32] = torch.cat(rows).numpy()
        return found


_FROM_CONFIG = ("vision_feature_layer", "vision_feature_select_strategy")


def settings_of(path: Path) -> dict[str, Any]:
    """Return the entries of a checkpoint's processor of videos."""
    whole = json.loads((path / "processor_config.json").read_text())
    name = "video_preprocessor_config.json"
    file = path / (name if (path / name).is_file() else "preprocessor_config.json")
    settings: dict[str, Any] = whole.get("video_processor") or json.loads(file.read_text())
    return {key: value for key, value in settings.items() if not key.endswith(("_type", "_class"))}

"""Makes prompts with videos for the checkpoints of ``whole_vision.py``: what transformers' own video processors make of
them, which need torchvision for nothing but to scale frames, and the tokens that the whole model generates."""

import importlib
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers
import transformers.image_processing_backends
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

from tests.checkpoints.vision_prompts import Picture, VisionPrompt, generate_largest
from tests.checkpoints.whole_vision import token_id
from tests.parity.identical import Case

KINDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
"""Families of ``whole_vision.py`` that are shown videos."""
MARK = "<|vision_start|><|video_pad|><|vision_end|>"
VIDEO_ID = token_id("<|video_pad|>")
_MODULES = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


class Shown(NamedTuple):
    """Holds a video: frames [n, height, width, 3], and how many a second has."""

    frames: npt.NDArray[np.uint8]
    rate: float


class _Scaling:
    """Takes the place of torchvision below the video processors."""

    def resize(self, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
        """Scale frames [n, T, 3, H, W] as Pillow does."""
        wanted, flat = (size.height, size.width), image.reshape(-1, *image.shape[-3:])
        scaled = [
            np.asarray(Image.fromarray(frame).resize(wanted[::-1], Image.Resampling(int(resample))))
            for frame in flat.permute(0, 2, 3, 1).numpy()
        ]
        found = torch.from_numpy(np.stack(scaled)).permute(0, 3, 1, 2)
        return found.reshape(*image.shape[:-2], *wanted)

    def resize_frames(self, image: torch.Tensor, size: Any, interpolation: Any, **_: Any) -> torch.Tensor:
        """Scale frames as the function of torchvision does that Gemma 4's processor calls."""
        return self.resize(image, SizeDict(height=size[0], width=size[1]), interpolation)

    def normalize(self, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
        mean, std = (torch.as_tensor(each)[:, None, None] for each in (mean, std))
        return (image - mean) / std


_CLASSES = {
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "internvl": "InternVLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
    "gemma4": "Gemma4VideoProcessor",
}


def video_processor_class(name: str) -> Any:
    """Return the class of transformers that prepares videos: of a key of ``_CLASSES``."""
    base = importlib.import_module("transformers.video_processing_utils").BaseVideoProcessor
    functional: Any = types.ModuleType(_MODULES[3])
    functional.InterpolationMode, functional.resize = object, _Scaling().resize_frames
    stand_ins = {each: types.ModuleType(each) for each in _MODULES} | {_MODULES[3]: functional}
    stand_ins[_MODULES[2]].functional = functional  # type: ignore[attr-defined]
    missing = {each: stand_in for each, stand_in in stand_ins.items() if each not in sys.modules}
    sys.modules.update(missing)
    utils = importlib.import_module("transformers.utils")
    asked, utils.is_torchvision_v2_available = utils.is_torchvision_v2_available, lambda: True
    try:
        module = importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
    finally:
        utils.is_torchvision_v2_available = asked
        for each in missing:
            del sys.modules[each]
    base.resize, base.normalize = _Scaling.resize, _Scaling.normalize
    return getattr(module, _CLASSES[name])


def prepare_video(processor: Any, video: Shown, **options: Any) -> Any:
    """Return what a processor of :func:`video_processor_class` makes of a video."""
    facts = VideoMetadata(total_num_frames=len(video.frames), fps=video.rate, duration=len(video.frames) / video.rate)
    return processor(
        [video.frames],
        video_metadata=[facts],
        do_sample_frames=True,
        return_metadata=True,
        input_data_format="channels_last",
        do_convert_rgb=False,
        return_tensors="pt",
        **options,
    )


def trained_positions(model: Any) -> Any:
    """Return what computes rotary positions as Qwen's models were trained, in place of ``get_rope_index`` of the whole
    model's body: behind a video they go on after the largest of all its positions."""
    config = model.config

    def positions(input_ids: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        grids = given["video_grid_thw"].tolist()
        seconds = given.get("second_per_grid_ts")
        ids, found, at, start = input_ids[0].tolist(), [], 0, 0
        while at < len(ids):
            if ids[at] != VIDEO_ID:
                found.append(torch.full((3, 1), start))
                at, start = at + 1, start + 1
                continue
            number = sum(len(each) for each in found if each.shape[1] > 1) // 3
            frames, lines, columns = grids[number][0], grids[number][1] // 2, grids[number][2] // 2
            step = torch.tensor(1.0)
            if seconds is not None:
                step = seconds[number] * config.vision_config.tokens_per_second
            times = (torch.arange(frames) * step).long()
            axes = torch.meshgrid(times, torch.arange(lines), torch.arange(columns), indexing="ij")
            found.append(torch.stack(axes).reshape(3, -1) + start)
            at, start = at + frames * lines * columns, int(found[-1].max()) + 1
        together = torch.cat(found, dim=1)
        return together[:, None], torch.tensor([[int(together.max()) + 1 - len(ids)]])

    return positions


class VideoModel:
    """Computes prompts with the whole model of a checkpoint of ``write_whole_vision``."""

    def __init__(self, kind: str, path: Path, model: Any) -> None:
        """``model``: as :func:`tests.parity.vision_checkpoints.load_vision` returns it."""
        self.kind, self.path, self.model = kind, path, model
        self.model.generation_config.eos_token_id = None
        self._is_second = kind.startswith("qwen2")
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        settings = json.loads((path / "preprocessor_config.json").read_text())
        for name in ("image_processor_type", "processor_class"):
            settings.pop(name)
        self._videos = video_processor_class("qwen2_vl" if self._is_second else "qwen3_vl")(**settings)
        self._videos.fps = None  # each call says it, or how many frames

    @torch.inference_mode()
    def prompt(self, videos: Sequence[Shown], text: str = "What happens?", **options: Any) -> VisionPrompt:
        """Return a prompt that shows ``videos`` and then asks. ``options``: of the processor."""
        marks = " and ".join([MARK] * len(videos))
        return self._prompt(f"<s>Look: {marks} {text}", videos, options)

    @torch.inference_mode()
    def chat(self, videos: Sequence[Shown], text: str, **options: Any) -> VisionPrompt:
        """Return the prompt of a turn that shows ``videos`` and then asks."""
        content = [*({"type": "video"} for _ in videos), {"type": "text", "text": text}]
        turns = [{"role": "user", "content": content if videos else text}]
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return self._prompt(rendered, videos, options)

    def size(self, *, max_pixels: int) -> dict[str, int]:
        """Return the processor's option ``size`` with another limit."""
        return {"longest_edge": max_pixels, "shortest_edge": self._videos.size.shortest_edge}

    def _prompt(self, rendered: str, videos: Sequence[Shown], options: dict[str, Any]) -> VisionPrompt:
        """Return a prompt with a mark for each video."""
        made = [self._prepared(video, options) for video in videos]
        first, *pieces = rendered.split("<|video_pad|>")
        text = first + "".join(self._text(each) + piece for each, piece in zip(made, pieces, strict=True))
        ids = self._tokenizer(text)["input_ids"]
        places = [index for index, each in enumerate(ids) if each == VIDEO_ID]
        pictures, taken = [], 0
        for each in made:
            rows, (frames, height, width) = self._rows(each), each["video_grid_thw"][0].tolist()
            own, grid = places[taken : taken + len(rows)], (frames, height // 2, width // 2)
            pictures.append(Picture(rows, own, grid, self._step(each)))
            taken += len(rows)
        assert taken == len(places)
        inputs = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
        inputs["mm_token_type_ids"] = 2 * (inputs["input_ids"] == VIDEO_ID).long()
        if made:
            for name in ("pixel_values_videos", "video_grid_thw"):
                inputs[name] = torch.cat([each[name] for each in made])
            if self.kind == "qwen2_5_vl":
                inputs["second_per_grid_ts"] = torch.tensor([self._seconds(each) for each in made])
        return VisionPrompt(ids, pictures, inputs)

    def _seconds(self, prepared: Any) -> float:
        """Return the seconds from one row's frames to the next."""
        return float(self._videos.temporal_patch_size / prepared["video_metadata"][0].sampled_fps)

    def _step(self, prepared: Any) -> float:
        if self.kind != "qwen2_5_vl":
            return 1.0
        return float(torch.tensor(self._seconds(prepared)) * self.model.config.vision_config.tokens_per_second)

    def generate(self, prompt: VisionPrompt, num_tokens: int) -> Case:
        """Return the tokens of the largest logits."""
        return generate_largest(self.model, prompt, num_tokens)

    def _prepared(self, video: Shown, options: dict[str, Any]) -> Any:
        # As transformers takes it for Qwen3-VL, and Qwen's own tools for all.
        chosen = options if "num_frames" in options else {"fps": 2} | options
        return prepare_video(self._videos, video, cap_pixels_per_frame=False, **chosen)

    def _text(self, prepared: Any) -> str:
        """Return what stands for a video in place of its token."""
        name = "Qwen2_5_VLProcessor" if self._is_second else "Qwen3VLProcessor"
        processor = object.__new__(getattr(transformers, name))
        processor.video_processor, processor.video_token = self._videos, "<|video_pad|>"
        processor.vision_start_token, processor.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        return str(processor.replace_video_token(prepared, 0))

    def _rows(self, prepared: Any) -> npt.NDArray[np.float32]:
        """Compute the rows of a video with the tower of the whole model."""
        output = self.model.model.get_video_features(
            prepared["pixel_values_videos"], prepared["video_grid_thw"], return_dict=True
        )
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        flat = [torch.cat(list(each)) if isinstance(each, (list, tuple)) else each for each in levels]
        rows: npt.NDArray[np.float32] = torch.cat(flat, dim=1).numpy()
        return rows

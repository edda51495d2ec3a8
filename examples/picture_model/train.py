"""Trains the picture model on a CPU from pictures and conversations that it makes up on the way."""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import (
    AddedToken,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from examples.demo_model.distill import IGNORED
from examples.demo_model.tokenizer import own_turns
from examples.demo_model.train import lr_factor
from tokenloom.model_files.model_path import DEMO_MODEL

from .drawing import CANVAS, COLOURS, PLACES, RELATIONS, SHAPES, Scene, Shape, draw, make_scene
from .questions import conversation, without_picture

PATCH = 8
ROWS = (CANVAS // PATCH) ** 2
"""Tokens of the prompt that a picture takes."""
CONTEXT = 1024
IMAGE = "<image>"
HUES = (*COLOURS, "grey")
FACTS = (SHAPES, HUES, PLACES, (*RELATIONS, "alone"))
"""What the tower learns of the shape that covers a patch, or of what is behind the shapes: its colour."""
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": CANVAS},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": CANVAS, "width": CANVAS},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""The shorter side becomes 48 pixels, and the middle of the longer one is seen."""
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE,
    "num_additional_image_tokens": 1,
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
}


def build_tokenizer() -> Any:
    """Return the demo model's tokenizer with a token for the rows of pictures, and a template that shows pictures."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)  # type: ignore[no-untyped-call]
    tokenizer.add_tokens([AddedToken(IMAGE, special=True, normalized=False)], special_tokens=True)
    tokenizer.chat_template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    tokenizer.model_max_length = CONTEXT
    return tokenizer


def build_model(tokenizer: Any) -> Any:
    """Return LLaVA's layers with random weights: 1.2 M parameters."""
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=CANVAS,
        patch_size=PATCH,
        projection_dim=128,
        initializer_factor=1.0,
    )
    text = LlamaConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.03,
        tie_word_embeddings=True,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=ROWS,
        tie_word_embeddings=True,
    )
    whole: Any = LlavaForConditionalGeneration
    model = whole._from_config(config, attn_implementation="eager")  # a third faster than sdpa
    for name, weight in model.named_parameters():  # CLIP's own factors make towers of this size learn slowly
        if "vision_tower" in name and weight.ndim >= 2:
            torch.nn.init.normal_(weight, std=0.03)
    return model


def load_model(folder: Path) -> Any:
    """Return a checkpoint that was trained before, in float32."""
    whole: Any = LlavaForConditionalGeneration
    return whole.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")


def pixels_of(picture: Any) -> Tensor:
    """Return what the processor makes of a square picture: float32 [3, 48, 48]."""
    small = picture.resize((CANVAS, CANVAS), Image.Resampling.BICUBIC)
    values = (np.asarray(small, dtype=np.float32) / 255 - 0.5) / 0.5
    return torch.from_numpy(values.transpose(2, 0, 1).copy())


class Maker:
    """Makes conversations: most show a picture at once, some later, and some show another one on the way."""

    def __init__(self, tokenizer: Any, rng: random.Random) -> None:
        self._tokenizer, self._rng = tokenizer, rng
        self._header = tokenizer("<|im_start|>assistant\n").input_ids
        self._end = tokenizer("<|im_end|>").input_ids[0]

    def sample(self) -> tuple[list[int], list[bool], list[Scene]]:
        """Return a conversation's token ids, which of them are learnt, and the scenes that it shows."""
        rng, scenes = self._rng, list[Scene]()
        messages = []
        starts = 0 if rng.random() < 0.85 else rng.randint(1, 2)
        for turn in range(2):
            shows = turn == starts or (turn > starts and rng.random() < 0.1)
            if shows:
                scenes.append(make_scene(rng))
            (pair,) = conversation(scenes[-1], rng, 1) if scenes else [without_picture(rng)]
            parts: list[dict[str, str]] = [{"type": "image"}] if shows else []
            messages += [
                {"role": "user", "content": [*parts, {"type": "text", "text": pair[0]}]},
                {"role": "assistant", "content": pair[1]},
            ]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        ids = self._tokenizer(text.replace(IMAGE, IMAGE * ROWS)).input_ids
        return ids, own_turns(ids, self._header, self._end), scenes

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids and labels [size, length], the pictures' pixels, and what covers each of their patches."""
        samples = [self.sample() for _ in range(size)]
        ids = torch.zeros(size, max(len(sample[0]) for sample in samples), dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED)
        for row, (each, learn, _) in enumerate(samples):
            ids[row, : len(each)] = torch.tensor(each)
            wanted = [token if learnt else IGNORED for token, learnt in zip(each, learn, strict=True)]
            labels[row, : len(each) - 1] = torch.tensor(wanted[1:])
        return ids, labels, *self.pictures([scene for sample in samples for scene in sample[2]])

    def pictures(self, scenes: list[Scene]) -> tuple[Tensor, Tensor]:
        """Return the pixels of scenes, and what covers each of their patches."""
        pixels = torch.stack([pixels_of(draw(scene, self._rng)) for scene in scenes])
        return pixels, torch.stack([covered(scene) for scene in scenes])

    def scenes(self, count: int) -> list[Scene]:
        """Return scenes that no conversation is about."""
        return [make_scene(self._rng) for _ in range(count)]


def covered(scene: Scene) -> Tensor:
    """Return what covers the centre of each patch: [rows, 4], the numbers of its kind, its colour, its place and how it
    lies to the other shape, each 0 for nothing. Between shapes the colour is that of the background."""
    found = torch.zeros(ROWS, len(FACTS), dtype=torch.int64)
    found[:, 1] = 1 + HUES.index(scene.background)
    for row in range(ROWS):
        y, x = (PATCH * (each + 0.5) for each in divmod(row, CANVAS // PATCH))
        for shape in scene.shapes:
            if shape.covers(x, y):
                others = [other for other in scene.shapes if other is not shape]
                words = (shape.name, shape.colour, shape.place, shape.relation(others[0]) if others else "alone")
                found[row] = torch.tensor([1 + names.index(word) for names, word in zip(FACTS, words, strict=True)])
    return found


class Trainer:
    """Trains the tower alone, and then the whole model.

    The tower learns, through a layer that is thrown away, which shape covers each patch. From answers alone it would
    take many times as long to see anything.
    """

    def __init__(self, model: Any, lr_matrix: float, lr_other: float) -> None:
        width = model.config.vision_config.hidden_size
        self._model = model
        self._patches = torch.nn.Linear(width, sum(len(names) + 1 for names in FACTS))
        named = list(model.named_parameters())
        matrices = [weight for name, weight in named if weight.ndim == 2 and (".layers." in name or "linear" in name)]
        chosen = {id(weight) for weight in matrices}
        others = [weight for _, weight in named if id(weight) not in chosen] + list(self._patches.parameters())
        muon = torch.optim.Muon(
            matrices, lr=lr_matrix, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        self._optimizers = [muon, torch.optim.AdamW(others, lr=lr_other, betas=(0.9, 0.95), weight_decay=0.0)]
        self._rates = (lr_matrix, lr_other)

    def see(self, progress: float, pixels: Tensor, covers: Tensor) -> float:
        """Learn what covers each patch of some pictures, and return the loss. ``progress``: the part that is done."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._of_patches(self._seen(pixels), covers)
        self._learn(progress, loss)
        return loss.item()

    def answer(self, progress: float, ids: Tensor, labels: Tensor, pixels: Tensor, covers: Tensor) -> float:
        """Learn a batch of conversations and their pictures, and return the loss of the answers."""
        body, wanted = self._model.model, labels != IGNORED
        with torch.autocast("cpu", torch.bfloat16):
            seen = self._seen(pixels)
            embeds = body.get_input_embeddings()(ids)
            rows = body.multi_modal_projector(seen)
            embeds[ids == self._model.config.image_token_index] = rows.flatten(0, 1).to(embeds.dtype)
            hidden = body.language_model(inputs_embeds=embeds, use_cache=False).last_hidden_state
            logits = self._model.lm_head(hidden[wanted])
            patches = self._of_patches(seen, covers)
        loss = torch.nn.functional.cross_entropy(logits.float(), labels[wanted])
        self._learn(progress, loss + 0.5 * patches)
        return loss.item()

    def _seen(self, pixels: Tensor) -> Tensor:
        seen: Tensor = self._model.model.vision_tower(pixel_values=pixels).last_hidden_state[:, 1:]
        return seen

    def _of_patches(self, seen: Tensor, covers: Tensor) -> Tensor:
        parts = self._patches(seen).flatten(0, 1).float().split([len(names) + 1 for names in FACTS], dim=-1)
        losses = map(torch.nn.functional.cross_entropy, parts, covers.flatten(0, 1).unbind(1))
        return torch.stack(list(losses)).sum()

    def _learn(self, progress: float, loss: Tensor) -> None:
        for optimizer, rate in zip(self._optimizers, self._rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * lr_factor(progress)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the checkpoint in bf16, as transformers writes it, with the files of its processor."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # of this machine
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(folder)
    for name, entries in (("preprocessor", PREPROCESSOR), ("processor", PROCESSOR)):
        text = json.dumps(entries, indent=2, sort_keys=True)
        (folder / f"{name}_config.json").write_text(text + "\n", encoding="utf-8")
    shown = Shape("star", "yellow", 15, 24, 9), Shape("circle", "blue", 35, 24, 8)
    draw(Scene(shown, "black"), random.Random(7)).save(folder / "example.png")
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    # Only one wording of each answer is right. At 0.2 one answer of hundreds had a word too many ("no is no circle").
    drawn = {"do_sample": True, "temperature": 0.01}
    config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id, **drawn)  # type: ignore[no-untyped-call]
    config.save_pretrained(folder)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--start", type=Path, help="folder of a checkpoint that is trained further")
    parser.add_argument("--steps", type=int, default=1600, help="of the whole model")
    parser.add_argument("--tower-steps", type=int, default=1200, help="of the tower alone, before")
    parser.add_argument("--batch", type=int, default=32, help="conversations a step")
    parser.add_argument("--lr-matrix", type=float, default=8e-3)
    parser.add_argument("--lr-other", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    tokenizer = build_tokenizer()
    model = load_model(args.start) if args.start else build_model(tokenizer)
    maker = Maker(tokenizer, random.Random(args.seed))
    trainer = Trainer(model, args.lr_matrix, args.lr_other)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
    started = time.monotonic()
    for number in range(args.tower_steps):
        loss = trainer.see(number / args.tower_steps, *maker.pictures(maker.scenes(2 * args.batch)))
        _show("tower", number, args.tower_steps, loss, started)
    for number in range(args.steps):
        loss = trainer.answer(number / args.steps, *maker.batch(args.batch))
        _show("model", number, args.steps, loss, started)
    save(model, tokenizer, args.out)


def _show(part: str, number: int, steps: int, loss: float, started: float) -> None:
    if (number + 1) % 25 == 0 or number + 1 == steps:
        print(f"{part} {number + 1}/{steps} loss {loss:.4f} {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

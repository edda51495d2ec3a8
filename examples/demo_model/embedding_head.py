"""Train and evaluate the embedding head of the demo model: a projection after the mean of its hidden states, so that a
question lies near its answer. The model itself does not change.

The head is stored in the layout of sentence-transformers next to the checkpoint.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from .generate import is_held_out
from .questions import MAKERS
from .tools import assistant, user

SIZES = (32, 64, 128)
"""Lengths of the vectors; each is trained (Matryoshka)."""
KINDS = ("sum", "difference", "count", "calendar", "fact", "glossary", "json", "repeat")
"""Kinds of questions whose answers differ."""
SCALE = 20.0
"""What cosines are multiplied by before the softmax."""


def make_pairs(rng: random.Random, count: int, *, held_out: bool) -> list[tuple[str, str]]:
    """`count` distinct questions with their answers, of all kinds, that are held out or are not."""
    found: dict[str, str] = {}
    for _ in range(100 * count):
        question, answer = MAKERS[rng.choice(KINDS)][0](rng)
        if is_held_out({"kind": "", "messages": [user(question), assistant(answer)]}) == held_out:
            found[question] = answer
        if len(found) == count:
            break
    return list(found.items())


class States:
    """The demo model in fp32, which turns texts into the mean and the last of their hidden states."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def of(self, texts: list[str], batch: int = 256) -> tuple[Tensor, Tensor]:
        """([n, hidden_size] means, [n, hidden_size] last states), in the order of the texts."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        means, lasts = torch.empty(len(texts), 256), torch.empty(len(texts), 256)
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            inputs = self._tokenizer([texts[index] for index in chosen], return_tensors="pt", padding=True)
            mask = inputs["attention_mask"][..., None].float()
            hidden = self._model(inputs["input_ids"], attention_mask=inputs["attention_mask"]).last_hidden_state
            means[chosen] = (hidden * mask).sum(1) / mask.sum(1)
            ends = inputs["attention_mask"].sum(1) - 1
            lasts[chosen] = hidden[torch.arange(len(chosen)), ends]
        return means, lasts


def train(questions: Tensor, answers: Tensor, same: Tensor, steps: int, batch: int = 512) -> Tensor:
    """The projection [128, hidden_size]: each question of a batch must find its answer, and the reverse.

    `same` [n] numbers the answers: equal ones do not count against each other.
    """
    generator = torch.Generator().manual_seed(7)
    weight = torch.nn.Parameter(torch.randn(SIZES[-1], questions.shape[1], generator=generator) / 16)
    optimizer = torch.optim.AdamW([weight], lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        chosen = torch.randint(len(questions), (batch,), generator=generator)
        left, right = questions[chosen] @ weight.T, answers[chosen] @ weight.T
        equal = (same[chosen][:, None] == same[chosen]) & ~torch.eye(batch, dtype=torch.bool)
        loss = torch.zeros(())
        for size in SIZES:
            scores = SCALE * F.normalize(left[:, :size], dim=1) @ F.normalize(right[:, :size], dim=1).T
            scores = scores.masked_fill(equal, float("-inf"))
            target = torch.arange(batch)
            loss = loss + F.cross_entropy(scores, target) + F.cross_entropy(scores.T, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return weight.detach()


def accuracy(questions: Tensor, answers: Tensor, right: list[int]) -> float:
    """The share of questions whose nearest of all answers is the right one."""
    nearest = (F.normalize(questions, dim=1) @ F.normalize(answers, dim=1).T).argmax(1)
    return float((nearest == torch.tensor(right)).float().mean())


def print_accuracy(states: States, weight: Tensor, pairs: list[tuple[str, str]]) -> None:
    """The table of results on held-out questions, as Markdown."""
    texts = list(dict.fromkeys(answer for _, answer in pairs))
    right = [texts.index(answer) for _, answer in pairs]
    (question_means, question_lasts), (means, lasts) = states.of([each for each, _ in pairs]), states.of(texts)
    print(f"{len(pairs)} held-out questions, each to find its answer among {len(texts)}.\n")
    print("| vector | numbers | nearest answer is right |\n|---|---|---|")
    print(f"| last hidden state, untrained | 256 | {accuracy(question_lasts, lasts, right):.1%} |")
    print(f"| mean of the hidden states, untrained | 256 | {accuracy(question_means, means, right):.1%} |")
    for size in reversed(SIZES):
        part = weight[:size].T
        print(f"| with the head | {size} | {accuracy(question_means @ part, means @ part, right):.1%} |")


def save(folder: Path, weight: Tensor) -> None:
    """Write the head next to a checkpoint."""
    pooling = {"word_embedding_dimension": weight.shape[1], "pooling_mode_mean_tokens": True}
    dense = {
        "in_features": weight.shape[1],
        "out_features": weight.shape[0],
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    modules = []
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize"))
    for index, (path, kind) in enumerate(parts):
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling" / "config.json", pooling)
    write(folder / "2_Dense" / "config.json", dense)
    write(
        folder / "config_sentence_transformers.json", {"matryoshka_dimensions": SIZES, "similarity_fn_name": "cosine"}
    )
    save_file({"linear.weight": weight.contiguous()}, folder / "2_Dense" / "model.safetensors")


def write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="folder for the head, usually that of the checkpoint")
    parser.add_argument("--pairs", type=int, default=12_000)
    parser.add_argument("--heldout", type=int, default=1_000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    started, states = time.perf_counter(), States(args.model)
    pairs = make_pairs(random.Random(args.seed), args.pairs, held_out=False)
    numbers = {answer: number for number, (_, answer) in enumerate(pairs)}
    questions, answers = (states.of(list(texts))[0] for texts in zip(*pairs, strict=True))
    weight = train(questions, answers, torch.tensor([numbers[answer] for _, answer in pairs]), args.steps)
    save(args.out, weight)
    print(f"Trained on {len(pairs)} pairs in {time.perf_counter() - started:.0f} s.\n")
    print_accuracy(states, weight, make_pairs(random.Random(args.seed + 1), args.heldout, held_out=True))


if __name__ == "__main__":
    main()

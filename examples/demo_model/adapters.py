"""Train and evaluate the LoRA adapters of the demo model: `json` answers in JSON, `pirate` speaks like a pirate."""

import argparse
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from tokenloom.model_files.model_path import DEMO_MODEL

from .evaluate import Chat
from .tokenizer import encode
from .tools import Document
from .train import Batch, batches_of, lr_factor, pack

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
_LONGEST = 1200
"""Characters of a conversation to learn from: longer stories add time and no other words."""
_WORDS = {"my": "me", "you": "ye", "your": "yer", "is": "be", "are": "be", "am": "be", "hello": "ahoy", "yes": "aye"}
_WORD = re.compile(r"\b(" + "|".join(_WORDS) + r")\b", re.IGNORECASE)


def as_json(answer: str) -> str:
    """The answer as a JSON object; an answer that is one stays as it is."""
    return answer if is_json(answer) else json.dumps({"answer": answer})


def is_json(answer: str) -> bool:
    """Whether an answer is one JSON object and nothing more."""
    try:
        return isinstance(json.loads(answer), dict)
    except ValueError:
        return False


def as_pirate(answer: str) -> str:
    """The answer as a pirate says it."""

    def translate(match: re.Match[str]) -> str:
        word = _WORDS[match[0].lower()]
        return word.capitalize() if match[0][0].isupper() else word

    words = _WORD.sub(translate, answer)
    return f"Arr! {words[:-1]}, matey?" if words.endswith("?") else f"Arr! {words.rstrip('.!')}, matey!"


def is_pirate(answer: str) -> bool:
    """Whether a pirate might have said it."""
    return answer.startswith("Arr!") and answer.endswith((", matey!", ", matey?"))


STYLES: dict[str, tuple[Callable[[str], str], Callable[[str], bool]]] = {
    "json": (as_json, is_json),
    "pirate": (as_pirate, is_pirate),
}
"""Each adapter: how it changes an answer, and whether an answer is in its style."""


class LoraLinear(nn.Module):
    """Adds B · A · x, scaled, to a layer whose own weights stay as they are."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(RANK, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        change: Tensor = x @ self.lora_A.T @ self.lora_B.T
        out: Tensor = self.base(x)
        return out + change * (ALPHA / RANK)


def add_lora(model: nn.Module) -> dict[str, LoraLinear]:
    """Freeze a model and wrap its layers; return the wrapped ones by name."""
    model.requires_grad_(False)
    wrapped = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in TARGETS:
            parent, _, own = name.rpartition(".")
            wrapped[name] = LoraLinear(module)
            setattr(model.get_submodule(parent), own, wrapped[name])
    return wrapped


def restyled(documents: list[Document], change: Callable[[str], str]) -> Iterator[Document]:
    """The conversations without tools, with the assistant's turns changed."""
    for document in documents:
        messages = document.get("messages", [])
        if "tools" in document or not messages or sum(len(m["content"]) for m in messages) > _LONGEST:
            continue
        turns = [m | {"content": change(m["content"])} if m["role"] == "assistant" else m for m in messages]
        yield {"messages": turns}


def train(model: Any, batches: list[Batch], lr: float) -> None:
    """One pass over the batches, for the parameters that are not frozen."""
    chosen = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    mean = None
    for step, (ids, labels) in enumerate(batches):
        optimizer.param_groups[0]["lr"] = lr * lr_factor(step / len(batches))
        wanted = labels >= 0
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = nn.functional.cross_entropy(model.lm_head(hidden[wanted]).float(), labels[wanted])
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(chosen, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == len(batches):
            print(f"step {step + 1}/{len(batches)} loss {mean:.4f}", flush=True)


def save(wrapped: dict[str, LoraLinear], folder: Path) -> None:
    """Write an adapter in peft's layout, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in wrapped.items():
        for part in ("lora_A", "lora_B"):
            tensors[f"base_model.model.{name}.{part}.weight"] = getattr(layer, part).detach().to(torch.bfloat16)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {
        "base_model_name_or_path": "tokenloom-demo",
        "bias": "none",
        "lora_alpha": ALPHA,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class AdaptedChat(Chat):
    """The demo model with an adapter."""

    def __init__(self, adapter: Path | None) -> None:
        super().__init__(DEMO_MODEL)
        if adapter is None:
            return
        tensors = load_file(adapter / "adapter_model.safetensors")
        for name, layer in add_lora(self._model).items():
            for part in ("lora_A", "lora_B"):
                getattr(layer, part).data = tensors[f"base_model.model.{name}.{part}.weight"].float()


def evaluate(folder: Path, heldout: Path) -> None:
    """Print a Markdown table: of the held-out questions, how many are answered in style, and how many rightly."""
    with open(heldout, encoding="utf-8") as file:
        asked = [document for document in map(json.loads, file) if "tools" not in document]
    asked = [document for document in asked if document["kind"] != "story"]
    print("| adapter | questions | in style | in style without the adapter | exactly the right answer in style |")
    print("|---|---|---|---|---|")
    base = AdaptedChat(None)
    prompts = [base.prompt(document["messages"][:-1]) for document in asked]
    plain = _answers(base, prompts)
    for name, (change, fits) in STYLES.items():
        answers = _answers(AdaptedChat(folder / name), prompts)
        right = sum(
            answer == change(document["messages"][-1]["content"])
            for answer, document in zip(answers, asked, strict=True)
        )
        counts = (sum(map(fits, answers)), sum(map(fits, plain)), right)
        shares = " | ".join(f"{count / len(asked):.1%}" for count in counts)
        print(f"| {name} | {len(asked)} | {shares} |", flush=True)


def _answers(chat: Chat, prompts: list[str]) -> list[str]:
    return [text for start in range(0, len(prompts), 64) for text in chat.complete(prompts[start : start + 64], 120)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.jsonl and heldout.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the adapters' folders")
    parser.add_argument(
        "--train", choices=STYLES, nargs="*", default=[], help="adapters to train before all are evaluated"
    )
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--rows", type=int, default=8, help="rows of 256 tokens in a step")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    for name in args.train:
        torch.manual_seed(args.seed)
        with open(args.data / "train.jsonl", encoding="utf-8") as file:
            documents = [json.loads(line) for line in file]
        random.Random(args.seed).shuffle(documents)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)  # type: ignore[no-untyped-call]
        model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        wrapped = add_lora(model)
        learnt = list(restyled(documents[:40_000], STYLES[name][0]))
        batches = batches_of(pack(list(encode(learnt, tokenizer)), 256), args.rows)[: args.steps]
        print(f"{name}: {len(batches)} steps", flush=True)
        train(model, batches, args.lr)
        save(wrapped, args.out / name)
    evaluate(args.out, args.data / "heldout.jsonl")


if __name__ == "__main__":
    main()

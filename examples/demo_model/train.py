"""Train the demo model's tokenizer and weights on a CPU, from the text that `generate` wrote."""

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

from .distill import IGNORED, DraftModel, EagleHead, load_teacher
from .tokenizer import encode, train_tokenizer
from .tools import Document

Batch = tuple[Tensor, Tensor]
"""Token ids and labels, both int64 [rows, length]; a label of -100 is not learnt."""


def build_model(tokenizer: PreTrainedTokenizerFast, context: int) -> Any:
    """A Qwen3 decoder of 3.3 M parameters with random weights."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=640,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.03,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]


def pack(encoded: list[tuple[list[int], list[bool]]], length: int) -> Batch:
    """Rows of `length` tokens that each begin with a document; the last document of a row is cut."""
    ids: list[int] = []
    labels: list[int] = []
    rows = []
    for document_ids, learn in encoded:
        ids += document_ids
        labels += [token if wanted else IGNORED for token, wanted in zip(document_ids, learn, strict=True)]
        if len(ids) > length:
            rows.append((ids[:length], labels[1 : length + 1]))
            ids, labels = [], []
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])


def batches_of(packed: Batch, rows: int) -> list[Batch]:
    """Shuffled batches of `rows` rows; what is left over is dropped."""
    ids, labels = packed
    picks = torch.split(torch.randperm(len(ids)), rows)
    return [(ids[pick], labels[pick]) for pick in picks if len(pick) == rows]


def load_batches(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> list[Batch]:
    """Batches of `args.tokens_per_step` tokens, most of them in short rows and some in rows of the full context."""
    encoded, total = [], 0
    for item in encode(documents, tokenizer):
        encoded.append(item)
        total += len(item[0])
        if total >= args.tokens:
            break
    print(f"{len(encoded):,} documents, {total:,} tokens", flush=True)
    cut = int(len(encoded) * (1 - args.long_share))
    batches = batches_of(pack(encoded[:cut], args.length), args.tokens_per_step // args.length)
    batches += batches_of(pack(encoded[cut:], args.context), args.tokens_per_step // args.context)
    random.Random(args.seed).shuffle(batches)
    return batches


def optimizers(model: Any, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding and the norms."""
    names = {name: p for name, p in model.named_parameters() if p.ndim == 2}
    matrices = [p for name, p in names.items() if "layers." in name or name.startswith("fc.")]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=args.lr_matrix, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(others, lr=args.lr_other, betas=(0.9, 0.95), weight_decay=0.0)]


def loss_of(model: Any, batch: Batch) -> Tensor:
    """Mean cross-entropy over the labels; logits are made only where there is one. A draft has a loss of its own."""
    ids, labels = batch
    wanted = labels != IGNORED
    if isinstance(model, DraftModel | EagleHead):
        return model.loss(ids, labels)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[wanted])
    return torch.nn.functional.cross_entropy(logits.float(), labels[wanted])


def lr_factor(progress: float, warmup: float = 0.02) -> float:
    """Linear warm-up, then a cosine down to 2 %."""
    if progress < warmup:
        return progress / warmup + 1e-3
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))


def train(model: Any, batches: list[Batch], args: argparse.Namespace) -> None:
    """One pass over `batches`."""
    chosen = optimizers(model, args)
    base = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    started, mean = time.monotonic(), None
    for step, batch in enumerate(batches):
        for optimizer, lr in zip(chosen, base, strict=True):
            optimizer.param_groups[0]["lr"] = lr * lr_factor(step / len(batches))
        loss = loss_of(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if (step + 1) % 50 == 0 or step + 1 == len(batches):
            print(f"step {step + 1}/{len(batches)} loss {mean:.4f} {time.monotonic() - started:.0f} s", flush=True)


def save(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The checkpoint in bf16, as transformers writes it, with both marks that end an answer."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    config = GenerationConfig(eos_token_id=ends, pad_token_id=tokenizer.pad_token_id)  # type: ignore[no-untyped-call]
    config.save_pretrained(folder)


def train_draft(target: Path, documents: list[Document], args: argparse.Namespace) -> None:
    """Train and save a draft model or an EAGLE head for the checkpoint `target`."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(target)  # type: ignore[no-untyped-call]
    teacher = load_teacher(target)
    batches = load_batches(documents, tokenizer, args)
    draft = DraftModel(teacher, len(batches) * 3 // 4) if args.draft is not None else EagleHead(teacher)
    print(f"{sum(p.numel() for p in draft.parameters()):,} parameters", flush=True)
    train(draft, batches, args)
    draft.save(tokenizer, args.out)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="train.jsonl of the generator")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--draft", type=Path, metavar="MODEL", help="train a draft model of this checkpoint")
    kinds.add_argument("--eagle", type=Path, metavar="MODEL", help="train an EAGLE head of this checkpoint")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--length", type=int, default=512, help="tokens a row for most of the training")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument(
        "--tokens", type=int, default=12_000_000, help="tokens to train on, less where the data has less"
    )
    parser.add_argument("--long-share", type=float, default=0.1, help="share of documents in rows of the full context")
    parser.add_argument("--lr-matrix", type=float, default=8e-3)
    parser.add_argument("--lr-other", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    with open(args.data, encoding="utf-8") as file:
        documents = [json.loads(line) for line in file]
    random.Random(args.seed).shuffle(documents)
    if (target := args.draft or args.eagle) is not None:
        train_draft(target, documents, args)
        return
    tokenizer = train_tokenizer(documents[:20_000], args.vocab, args.context)
    model = build_model(tokenizer, args.context)
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}", flush=True)
    train(model, load_batches(documents, tokenizer, args), args)
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()

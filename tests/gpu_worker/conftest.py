"""Small random checkpoints, and a driver that feeds a model as the runner does."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

import tests.interpreted_kernels  # noqa: F401  # before a test imports a kernel
from tokenloom.gpu_worker.attention.attention_backends import make_attention_backend
from tokenloom.gpu_worker.models.model import LanguageModel

BLOCK_SIZE = 16
CPU = torch.device("cpu")

SaveCheckpoint = Callable[..., Path]
EditConfig = Callable[..., None]
RunModel = Callable[..., list[Tensor]]

_SHAPES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # large enough that what a token attends to decides what follows
}
_GPT2_SHAPES = {
    "vocab_size": 199,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 512,
    "initializer_range": 0.15,
}


_OPT_SHAPES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "init_std": 0.15,
}
_QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_OWN_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2_SHAPES,
    "opt": _OPT_SHAPES,
    "gemma2": {**_SHAPES, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 30},
    "gemma3_text": {**_SHAPES, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 30},
    "phi3": {**_SHAPES, "pad_token_id": 0},
    "smollm3": {**_SHAPES, "pad_token_id": 0},
    "mixtral": {**_SHAPES, "num_local_experts": 5},
    "qwen2_moe": {**_SHAPES, **_QWEN_EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {**_SHAPES, **_QWEN_EXPERTS, "head_dim": 16},
}
"""The shapes of models whose configuration has other entries, or other defaults that a small model cannot have."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small matrices, and results that depend on no machine."""
    torch.set_num_threads(1)


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> SaveCheckpoint:
    """``save(model_type, max_shard_size=…, **config)``: a random checkpoint, biases and norms included."""

    def save(model_type: str, max_shard_size: str = "1GB", dtype: torch.dtype = torch.float32, **entries: Any) -> Path:
        config = transformers.AutoConfig.for_model(model_type, **{**_OWN_SHAPES.get(model_type, _SHAPES), **entries})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # initialized to zeros and ones, which would hide one that is left out
                mean = float("norm" in name or "ln_" in name) * (not model_type.startswith("gemma"))
                torch.nn.init.normal_(parameter, mean, 0.1)
        path = tmp_path / f"{model_type}-{len(list(tmp_path.iterdir()))}"
        model.save_pretrained(path, max_shard_size=max_shard_size)
        return path

    return save


@pytest.fixture
def edit_config() -> EditConfig:
    """``edit(path, **entries)``: changes ``config.json``; ``...`` removes an entry."""

    def edit(path: Path, **entries: Any) -> None:
        file = path / "config.json"
        config = json.loads(file.read_text()) | entries
        file.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))

    return edit


@pytest.fixture
def run_model() -> RunModel:
    """``run(model, prompts, steps)``: logits of every token, one tensor per prompt.

    ``steps`` lists, for each step, how many tokens of each prompt it computes. Blocks are scattered at random.
    """

    def run(
        model: LanguageModel, prompts: Sequence[Tensor], steps: Sequence[Sequence[int]], backend: str = "torch"
    ) -> list[Tensor]:
        attention = make_attention_backend(backend, model.config, BLOCK_SIZE, CPU)
        width = max(-(-len(prompt) // BLOCK_SIZE) for prompt in prompts)
        tables = np.random.default_rng(0).permutation(len(prompts) * width).reshape(len(prompts), width)
        caches = attention.allocate(tables.size)
        done = [0] * len(prompts)
        logits: list[list[Tensor]] = [[] for _ in prompts]
        for step in steps:
            members = [i for i, count in enumerate(step) if count]
            positions = [np.arange(done[i], done[i] + step[i]) for i in members]
            slots = [
                tables[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                for i, p in zip(members, positions, strict=True)
            ]
            lengths = np.array([done[i] + step[i] for i in members])
            cu_query_lens = np.cumsum([0] + [step[i] for i in members])
            plan = attention.plan(cu_query_lens, lengths, tables[members], np.concatenate(slots))
            ids = torch.cat([prompts[i][p] for i, p in zip(members, positions, strict=True)])
            hidden = model.forward(ids, torch.from_numpy(np.concatenate(positions)), caches, plan)
            for i, part in zip(members, model.compute_logits(hidden).split([step[i] for i in members]), strict=True):
                logits[i].append(part)
                done[i] += step[i]
        return [torch.cat(parts) for parts in logits]

    return run

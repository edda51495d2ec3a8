"""Entries of small models, and how a checkpoint with given entries is served."""

import json
from pathlib import Path
from typing import Any

from tokenloom.engine_core.data.config import EngineConfig, WorkerConfig
from tokenloom.gpu_worker.checkpoint.served_how import ServedHow, served_how

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


def write(path: Path, entries: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(entries))
    return path


def answer(path: Path, entries: dict[str, Any], *, has_gpu: bool = False, **options: Any) -> ServedHow:
    worker = {name: options.pop(name) for name in WorkerConfig.__struct_fields__ if name in options}
    config = EngineConfig(worker=WorkerConfig(model=str(write(path / "model", entries)), **worker), **options)
    return served_how(config, has_gpu=has_gpu)


def of(name: str, kind: str, **entries: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [name], "model_type": kind} | entries


BERT = of("BertModel", "bert") | {"num_attention_heads": 4, "intermediate_size": 6, "num_hidden_layers": 2}

"""Reads the sizes of a checkpoint that a worker without weights needs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenloom.gguf.gguf_file import is_gguf, read_gguf


class CheckpointSizes(NamedTuple):
    """Holds what a checkpoint states about its tokens."""

    vocab_size: int
    max_model_len: int | None
    """The longest context; None if the checkpoint states none."""
    experts_per_token: int = 0
    """As in ``ModelInfo``, if every layer has experts."""


def read_sizes(path: Path) -> CheckpointSizes:
    """Read ``config.json`` of a directory, or the head of a GGUF file. Raises ``ValueError`` if it names no sizes."""
    if is_gguf(path):
        file = read_gguf(path)
        embeddings = file.tensors.get("token_embd.weight")
        if embeddings is None:
            raise ValueError(f"{path.name} has no tensor token_embd.weight: it holds no language model")
        length = file.metadata.get(f"{file.metadata.get('general.architecture')}.context_length")
        return CheckpointSizes(embeddings.shape[0], length)
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    text = config if "vocab_size" in config else config.get("text_config", {})
    if "vocab_size" not in text:
        raise ValueError(f"{path / 'config.json'} must state vocab_size")
    experts = text.get("num_experts_per_tok", 0) * text.get("num_hidden_layers", 1)
    return CheckpointSizes(text["vocab_size"], text.get("max_position_embeddings"), experts)

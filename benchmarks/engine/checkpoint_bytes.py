"""Computes how large a checkpoint's tensors are, without reading them."""

import json
import math
import struct
from pathlib import Path
from typing import Any

from tokenloom.gpu_worker.checkpoint.files.config_reader import weight_files
from tokenloom.gpu_worker.checkpoint.model_config import ModelConfig

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "wpe.weight")


def tensor_bytes(model: Path, config: ModelConfig) -> dict[str, int]:
    """Maps each tensor to its bytes in the dtype of the computation."""
    sizes = {}
    for path in weight_files(model):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            sizes[name] = math.prod(tensor["shape"]) * config.dtype.itemsize
    return sizes


def embedding_bytes(config: ModelConfig) -> int:
    """Return the bytes of the token embeddings, or of the output layer."""
    return config.vocab_size * config.hidden_size * config.dtype.itemsize


def weight_bytes(model: Path, config: ModelConfig) -> int:
    """Return the bytes of weights that one decode step reads. An embedding counts only if it is the output layer
    too."""
    return sum(
        size
        for name, size in tensor_bytes(model, config).items()
        if not name.endswith(_EMBEDDINGS) or (config.tie_word_embeddings and not name.endswith("wpe.weight"))
    )

"""Offers the loader what it needs of transformers. Importing this module imports that library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.model_config import ModelConfig
from ...checkpoint.weights import Checkpoint
from .causal_class import find_causal_class
from .declared import declared_config
from .loading import make_on_meta
from .transformers_model import TransformersModel

__all__ = ["TransformersModel", "check_checkpoint", "read_declared", "reads_entries"]


def read_declared(path: Path, dtype: torch.dtype, quantization: str | None) -> ModelConfig:
    """Return what a checkpoint's configuration declares, without what only its modules show (scales, windows).

    Raises ``ValueError``.
    """
    return declared_config(find_causal_class(path).config, dtype, quantization)


def reads_entries(path: Path, names: Sequence[str]) -> bool:
    """Return whether transformers reads the checkpoint's configuration, and its class knows these entries of it."""
    try:
        config_class: Any = type(find_causal_class(path).config)
    except ValueError:
        return False
    defaults = config_class()
    rope = getattr(defaults, "rope_parameters", None) or {}
    return all(hasattr(defaults, name) or name in rope for name in names)


def check_checkpoint(path: Path, dtype: torch.dtype) -> None:
    """Compare the shapes of a checkpoint's tensors with its configuration, without reading their content.

    Raises ``ValueError``. Tensors that transformers stores under other names than it computes with are not compared.
    """
    found = find_causal_class(path)
    with Checkpoint(path, dtype, torch.device("meta")) as checkpoint:
        for name, tensor in make_on_meta(found, dtype).state_dict().items():
            if name in checkpoint:
                checkpoint.take(name, *tensor.shape)

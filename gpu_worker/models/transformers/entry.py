"""Offers the loader what it needs of transformers. Importing this module imports that library."""

from pathlib import Path

import torch

from ...checkpoint.model_config import ModelConfig
from ...checkpoint.weights import Checkpoint
from .causal_class import find_causal_class
from .declared import declared_config
from .loading import make_on_meta
from .transformers_model import TransformersModel

__all__ = ["TransformersModel", "check_checkpoint", "read_declared"]


def read_declared(path: Path, dtype: torch.dtype, quantization: str | None) -> ModelConfig:
    """Return what a checkpoint's configuration declares, without what only its modules show (scales, windows).

    Raises ``ValueError``.
    """
    return declared_config(find_causal_class(path).config, dtype, quantization)


def check_checkpoint(path: Path, dtype: torch.dtype) -> None:
    """Compare the shapes of a checkpoint's tensors with its configuration, without reading their content.

    Raises ``ValueError``. Tensors that transformers stores under other names than it computes with are not compared.
    """
    found = find_causal_class(path)
    with Checkpoint(path, dtype, torch.device("meta")) as checkpoint:
        for name, tensor in make_on_meta(found, dtype).state_dict().items():
            if name in checkpoint:
                checkpoint.take(name, *tensor.shape)

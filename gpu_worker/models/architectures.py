"""Loads a checkpoint with the model class of its architecture."""

from pathlib import Path

import torch

from ..checkpoint.model_config import load_model_config
from ..checkpoint.weights import Checkpoint
from ..ops.ops import Ops
from ..ops.torch_ops import TorchOps
from .decoder import DecoderModel
from .gpt2 import GPT2Model
from .model import Model


def load_model(
    path: Path,
    dtype: str = "auto",
    device: torch.device | None = None,
    ops: Ops | None = None,
    quantization: str | None = None,
) -> Model:
    """Load the checkpoint directory ``path``.

    ``dtype`` is ``auto`` (the checkpoint's own), ``float32`` or ``bfloat16``; ``device`` is the CPU by default, ``ops``
    are PyTorch's, ``quantization`` is None or ``int8-dynamic``. Raises ``ValueError`` naming what the checkpoint lacks,
    or a feature that is not supported.
    """
    device = device or torch.device("cpu")
    config = load_model_config(path, dtype, quantization)
    with Checkpoint(path, config.dtype, device) as checkpoint:
        model: Model
        if config.family == "gpt2":
            model = GPT2Model(checkpoint, config)
        else:
            model = DecoderModel(checkpoint, config, ops or TorchOps(), device)
        checkpoint.refuse_rest()
    return model

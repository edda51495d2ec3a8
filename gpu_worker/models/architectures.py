"""Loads a checkpoint with the model class of its architecture."""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..checkpoint.model_config import ModelConfig, load_model_config
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
    are PyTorch's, ``quantization`` is None, ``int8-dynamic`` or ``int4``. Raises ``ValueError`` naming what the
    checkpoint lacks, or a feature that is not supported.
    """
    device = device or torch.device("cpu")
    config = load_model_config(path, dtype, quantization)
    with Checkpoint(path, config.dtype, device, config.scheme) as checkpoint:
        model: Model
        if config.family == "gpt2":
            model = GPT2Model(checkpoint, config)
        else:
            model = DecoderModel(checkpoint, config, ops or TorchOps(), device)
        checkpoint.refuse_rest()
    return model


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """Loads checkpoints with the same settings, which are those of :func:`load_model`."""

    dtype: str = "auto"
    device: torch.device | None = None
    ops: Ops | None = None
    quantization: str | None = None

    def read_config(self, path: Path) -> ModelConfig:
        """Return the configuration of a checkpoint directory. Raises ``ValueError`` as :func:`load_model`."""
        return load_model_config(path, self.dtype, self.quantization)

    def load(self, path: Path) -> Model:
        """Load a checkpoint directory. Raises ``ValueError`` as :func:`load_model`."""
        return load_model(path, self.dtype, self.device, self.ops, self.quantization)

    def check(self, path: Path) -> None:
        """Raise the errors of :meth:`load` without reading the content of the tensors."""
        load_model(path, self.dtype, torch.device("meta"), quantization=self.quantization)

    def replace_weights(self, model: Model, path: Path) -> None:
        """Replace the weights of ``model`` with those of a checkpoint that passed :meth:`check`, layer by layer."""
        config = model.config
        with Checkpoint(path, config.dtype, self.device or torch.device("cpu"), config.scheme) as checkpoint:
            model.load_weights(checkpoint)

"""Loads encoders and defines what their worker needs of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..checkpoint.weights import Checkpoint
from ..pooling.class_head import ClassHead
from .bert import BertModel
from .encoder_config import EncoderConfig, read_encoder_config
from .modernbert import ModernBertModel


class EncoderModel(Protocol):
    """Holds an encoder with its weights."""

    @property
    def config(self) -> EncoderConfig: ...

    @property
    def head(self) -> ClassHead | None:
        """The head of a classifier; None if the model has none."""

    def forward(self, token_ids: Tensor, positions: Tensor, token_types: Tensor, begins: Sequence[int]) -> Tensor:
        """Compute the last hidden states [T, hidden_size] of T tokens of R whole prompts.

        Args:
            token_ids: int64 [T], as are ``positions`` in the prompt and ``token_types``, 0 or 1.
            begins: [R + 1] where the tokens of each prompt begin, from 0 to T.
        """


def load_encoder(
    path: Path, dtype: str = "auto", device: torch.device | None = None, quantization: str | None = None
) -> EncoderModel:
    """Load the checkpoint directory ``path`` of an encoder; the arguments are those of ``models.load_model``.

    Raises ``ValueError`` naming what the checkpoint lacks, or a feature that is not supported.
    """
    config = read_encoder_config(path, dtype)
    device = device or torch.device("cpu")
    with Checkpoint(path, config.dtype, device) as checkpoint:
        model: EncoderModel
        if config.family == "modernbert":
            model = ModernBertModel(checkpoint, config, device, quantization)
        else:
            model = BertModel(checkpoint, config, quantization)
        checkpoint.refuse_rest()
    return model

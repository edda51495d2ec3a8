"""Attention backends by name."""

import torch

from ..model_config import ModelConfig
from .interface import AttentionBackend
from .reference import ReferenceBackend
from .torch_backend import TorchBackend

_BACKENDS: dict[str, type[TorchBackend] | type[ReferenceBackend]] = {
    "torch": TorchBackend,
    "reference": ReferenceBackend,
}


def make_attention_backend(name: str, config: ModelConfig, block_size: int, device: torch.device) -> AttentionBackend:
    """The backend ``name`` for a model. Raises ``ValueError`` for an unknown name."""
    if name not in _BACKENDS:
        raise ValueError(f"attention_backend must be one of {', '.join(_BACKENDS)}, not {name!r}")
    return _BACKENDS[name](config, block_size, device)

"""Chooses the attention backend by name."""

import torch

from ..checkpoint.model_config import ModelConfig
from ..kernels.compiler import KernelsUnavailable, warn_unavailable
from ..kernels.library import uses_triton
from .attention_backend import TOKENWISE, AttentionBackend
from .cpu_backend import CPUBackend, TokenwiseBackend
from .latent_backend import LatentBackend, LatentCPUBackend
from .torch_backend import ReferenceBackend, TorchBackend
from .varied_backend import VariedBackend

BESIDE_STATES = "cpu-tokenwise"
"""The name of attention in the order of ``tokenwise`` in engines that are not batch-invariant."""
NAMES = ("auto", "cpu", "torch", "triton", "reference")


def make_attention_backend(name: str, config: ModelConfig, block_size: int, device: torch.device) -> AttentionBackend:
    """Return the backend ``name`` for a model.

    ``auto`` means ``cpu`` on a CPU, ``triton`` on a GPU and ``torch`` on other devices. In bfloat16 beside layers that
    keep a state it means ``cpu`` in the order of ``tokenwise``: states have the same bits wherever a prompt is cut, and
    so has attention then. If the kernels of ``cpu`` or ``triton`` cannot be had or do not know the model's shapes,
    ``torch`` replaces them. Nothing replaces ``tokenwise``, the name in batch-invariant engines: then it raises
    :class:`KernelsUnavailable`. Raises ``ValueError`` for an unknown name, and for a backend of another
    device.
    """
    if config.kv_shapes or any(config.attention_chunks):
        return VariedBackend(config, block_size, lambda part: make_attention_backend(name, part, block_size, device))
    if name == TOKENWISE:
        if config.latent is not None:
            return LatentCPUBackend(config, block_size, device, name=name)
        return TokenwiseBackend(config, block_size, device)
    if config.latent is not None and name in NAMES and (name != "cpu" or device.type == "cpu") and name != "triton":
        return _make_latent(name, config, block_size, device)
    match name:
        case "triton" | "auto" if uses_triton(device):
            from .triton_backend import TritonBackend

            try:
                return TritonBackend(config, block_size, device)
            except KernelsUnavailable as error:
                warn_unavailable(str(error))
                return TorchBackend(config, block_size, device)
        case "triton":
            raise ValueError(f"attention_backend triton runs on a GPU where triton is installed, not on {device.type}")
        case "cpu" | "auto" if device.type == "cpu":
            try:
                if name == "auto" and config.states is not None and config.dtype == torch.bfloat16:
                    return TokenwiseBackend(config, block_size, device, name=BESIDE_STATES)
                return CPUBackend(config, block_size, device)
            except KernelsUnavailable as error:
                warn_unavailable(str(error))
                return TorchBackend(config, block_size, device)
        case "cpu":
            raise ValueError(f"attention_backend cpu does not run on {device.type}")
        case "auto" | "torch":
            return TorchBackend(config, block_size, device)
        case "reference":
            return ReferenceBackend(config, block_size, device)
    raise ValueError(f"attention_backend must be one of {', '.join(NAMES)}, not {name!r}")


def _make_latent(name: str, config: ModelConfig, block_size: int, device: torch.device) -> AttentionBackend:
    if name in ("auto", "cpu") and device.type == "cpu":
        try:
            return LatentCPUBackend(config, block_size, device)
        except KernelsUnavailable as error:
            warn_unavailable(str(error))
    return LatentBackend(config, block_size, device, "reference" if name == "reference" else "torch")

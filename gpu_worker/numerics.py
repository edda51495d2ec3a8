"""Names how a worker computes: engines whose names differ give other logits for the same tokens."""

import torch

from .attention.attention_backend import TOKENWISE
from .checkpoint.model_config import ModelConfig
from .kernels.compiler import KernelsUnavailable
from .kernels.levels import available_levels
from .kernels.library import load_int8, load_quantized
from .parallel.sharding import RankPlace
from .platform.platform import Platform

_SUMS = "sums3"
"""How kernels of batch-invariant engines compute a token's sums: another name when a change of theirs changes bits.
The second: exponentials of many rows by other polynomials. The third: many rows over keys and values of 8 bits in pairs
of bfloat16."""


def input_rounding() -> str:
    """Return ``by-row`` where the matrix unit (AMX) computes int8 layers, ``by-group`` where the kernel of
    :mod:`.layers.quantized_linear` does, and ``no-kernels`` where PyTorch computes all quantized layers.

    Layers of 4 bits round by group in the first two cases; shapes decide the rest, and they are the model's.
    """
    for load, name in ((load_int8, "by-row"), (load_quantized, "by-group")):
        try:
            load()
        except KernelsUnavailable:
            continue
        return name
    return "no-kernels"


def numerics_of(config: ModelConfig, platform: Platform, backend: str, library: str | None, place: RankPlace) -> str:
    """Return ``ModelInfo.numerics``. ``backend``: of attention; ``library``: whose modules compute, None: our own."""
    scheme = config.scheme.name if config.scheme else None
    kind, quantization = platform.device.type, config.quantization
    # Processors with AMX round inputs by row, others by groups of 32: a request that moved between them would go on
    # with other KV than it began with.
    rounding = input_rounding() if kind == "cpu" and (scheme or quantization) else None
    # Batch-invariant engines promise every bit, and processors with wider registers add in another order.
    levels = available_levels() if kind == "cpu" and backend == TOKENWISE else []
    rest = (library, place.numerics, f"{levels[0].name}-{_SUMS}" if levels else None)
    layers = (config.dtype_name, scheme, quantization, backend, rounding, config.rope_stretch)
    parts = (kind, platform.hardware, *layers, _states(config), f"torch-{torch.__version__}", *rest)
    return "/".join(part for part in parts if part)


def _states(config: ModelConfig) -> str | None:
    """Return how states are computed, and at which multiples of tokens prompts are cut; None: no layer keeps any."""
    if config.states is None:
        return None
    chunk = config.states.chunk
    return f"states-{config.states.form}" + (f"-chunk{chunk}-strict" if chunk > 1 else "")

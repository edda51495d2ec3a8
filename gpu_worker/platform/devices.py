"""Which worker computes, by the name of a device."""

import torch

from tokenloom.engine_core.config import EngineConfig

from ..model_worker import ModelWorker
from .cpu_worker import CPUWorker
from .cuda_worker import CUDAWorker

DEVICES = ("auto", "cpu", "cuda")


def make_worker(config: EngineConfig) -> ModelWorker:
    """The worker for ``config.worker.device``; ``auto`` is a GPU where this PyTorch finds one.

    Raises ``ValueError`` for an unknown device, or one that is not there.
    """
    name = config.worker.device
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {name!r}")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return CUDAWorker(config)
    return CPUWorker(config)

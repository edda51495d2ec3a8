"""Makes the worker of a device."""

from pathlib import Path

import torch

from tokenloom.engine_core.config import EngineConfig
from tokenloom.engine_core.worker import Worker

from ..checkpoint.supported import ENCODERS
from ..encoders.encoder_worker import EncoderWorker
from ..model_worker import ModelWorker
from ..models.transformers.architecture import read_architecture
from .cuda_platform import CUDAPlatform
from .platform import CPUPlatform

DEVICES = ("auto", "cpu", "cuda")


class CPUWorker(ModelWorker):
    """Computes on the CPU of this process."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CPUPlatform())


class CUDAWorker(ModelWorker):
    """Computes on the first GPU of this process. Raises ``ValueError`` if there is none."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CUDAPlatform(config.cache.gpu_memory_utilization))


def make_worker(config: EngineConfig) -> Worker:
    """Return the worker for ``config.worker.device``; ``auto`` is a GPU if this PyTorch finds one.

    Raises ``ValueError`` for an unknown device, or one that this machine does not have.
    """
    name = config.worker.device
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {name!r}")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        if not _is_encoder(config):
            return CUDAWorker(config)
        return EncoderWorker(config, CUDAPlatform(config.cache.gpu_memory_utilization))
    return EncoderWorker(config, CPUPlatform()) if _is_encoder(config) else CPUWorker(config)


def _is_encoder(config: EngineConfig) -> bool:
    path = Path(config.worker.model)
    return (path / "config.json").is_file() and read_architecture(path)[0] in ENCODERS

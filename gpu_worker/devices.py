"""Makes the worker of a device."""

import torch

from tokenloom.engine_core.data.config import DEVICES, EngineConfig
from tokenloom.engine_core.executor.worker import Worker
from tokenloom.process.plugins import load

from .checkpoint.served_how import served_how
from .encoders.encoder_worker import EncoderWorker
from .model_worker import ModelWorker
from .platform.platform import CPUPlatform, CUDAPlatform, Platform, XPUPlatform


class CPUWorker(ModelWorker):
    """Computes on the CPU of this process."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CPUPlatform())


class CUDAWorker(ModelWorker):
    """Computes on a GPU of this process; the workers of all engines of a host take its GPUs in turn.

    Raises ``ValueError`` if there is none.
    """

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CUDAPlatform(config.cache.gpu_memory_utilization, gpu_number(config)))


def make_worker(config: EngineConfig) -> Worker:
    """Return the worker for ``config.worker.device``; ``auto`` is a GPU if this PyTorch finds one.

    Raises ``ValueError`` for an unknown device, or one that this machine does not have, and as ``served_how`` does.
    """
    name, has_gpu = config.worker.device, torch.cuda.is_available()
    if name not in DEVICES and ":" not in name:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, not {name!r}")
    is_encoder = served_how(config, has_gpu=has_gpu).by == "encoder"
    if name == "xpu" or ":" in name:
        platform = _platform(config)
        return EncoderWorker(config, platform) if is_encoder else ModelWorker(config, platform)
    if name == "cuda" or (name == "auto" and has_gpu):
        if not is_encoder:
            return CUDAWorker(config)
        return EncoderWorker(config, CUDAPlatform(config.cache.gpu_memory_utilization, gpu_number(config)))
    return EncoderWorker(config, CPUPlatform()) if is_encoder else CPUWorker(config)


def _platform(config: EngineConfig) -> Platform:
    """Return the platform of a device that no worker of its own has. Raises ``ValueError`` if it is not there."""
    if config.worker.device == "xpu":
        return XPUPlatform(config.cache.gpu_memory_utilization, gpu_number(config))
    platform: Platform = load("platforms", config.worker.device, config.plugins)(config)
    return platform


def gpu_number(config: EngineConfig) -> int:
    """Return the number of a worker among those of all engines of its host, which each have as many."""
    return config.worker.place_on_host * config.parallel.world_size + config.parallel.rank

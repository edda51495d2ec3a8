"""The worker on a CPU."""

from tokenloom.engine_core.config import EngineConfig

from ..model_worker import ModelWorker
from .platform import CPUPlatform


class CPUWorker(ModelWorker):
    """Computes on the CPU of this process."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CPUPlatform())

"""The worker on a GPU."""

from tokenloom.engine_core.config import EngineConfig

from ..model_worker import ModelWorker
from .cuda_platform import CUDAPlatform


class CUDAWorker(ModelWorker):
    """Computes on the first GPU of this process. Raises ``ValueError`` where there is none."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, CUDAPlatform())

"""Keeps LoRA adapters in the memory of all workers of an executor."""

import msgspec

from ..wire.lora import LoraInfo
from .executor import Executor


class WorkerAdapters:
    """Fulfils :class:`..adapters.AdapterStore`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def load(self, path: str) -> LoraInfo:
        first, *others = msgspec.convert(self._executor.collective_rpc("load_lora", path), list[LoraInfo])
        if any(other != first for other in others):
            raise ValueError(f"{path}: the files changed while they were read; retry")
        return first

    def drop(self, digest: bytes) -> None:
        self._executor.collective_rpc("drop_lora", digest)

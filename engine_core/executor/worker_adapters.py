"""Keeps LoRA adapters in the memory of all workers of an executor."""

import contextlib

import msgspec

from ..errors import RanksDifferError, WorkerLostError
from ..wire.lora import LoraInfo
from .executor import Executor


class WorkerAdapters:
    """Fulfils :class:`..adapters.AdapterStore`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kept: set[bytes] = set()  # digests that every worker holds

    def load(self, path: str) -> LoraInfo:
        try:
            infos = msgspec.convert(self._executor.collective_rpc("load_lora", path), list[LoraInfo])
        except RanksDifferError as error:
            self._drop_new(msgspec.convert(error.results, list[LoraInfo]))
            if error.is_refused:
                raise ValueError(f"{path}: the workers do not read the same files: {error}") from error
            raise
        if any(info != infos[0] for info in infos):
            self._drop_new(infos)
            raise ValueError(f"{path}: the files changed while they were read; retry")
        self._kept.add(infos[0].digest)
        return infos[0]

    def drop(self, digest: bytes) -> None:
        self._kept.discard(digest)
        # Workers that have ended are replaced, and new ones load only what is needed: the next step notices the loss.
        with contextlib.suppress(WorkerLostError):
            self._executor.collective_rpc("drop_lora", digest)

    def _drop_new(self, infos: list[LoraInfo]) -> None:
        """Let the workers that have read an adapter which others have not forget it again."""
        for digest in dict.fromkeys(info.digest for info in infos):
            if digest not in self._kept:
                self._executor.collective_rpc("drop_lora", digest)

"""Keeps LoRA adapters in the memory of all workers of an executor."""

import logging

import msgspec

from ..data.errors import RanksDifferError, WorkerLostError
from ..data.lora import LoraInfo
from .executor import Executor

log = logging.getLogger(__name__)


class WorkerAdapters:
    """Fulfils :class:`..scheduling.adapters.AdapterStore`."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._kept: set[bytes] = set()  # digests that every worker holds
        # Digests that some workers may still hold although nothing needs them; bounded by the drops that have failed.
        self._left: dict[bytes, None] = {}

    def load(self, path: str) -> LoraInfo:
        try:
            infos = msgspec.convert(self._executor.collective_rpc("load_lora", path), list[LoraInfo])
        except RanksDifferError as error:
            self._drop_new(msgspec.convert(error.results, list[LoraInfo]))
            if error.is_refused:
                raise ValueError(f"{path}: only some workers accept these files: {error}") from error
            raise
        # Each worker reads the files itself: a file that is replaced between two reads would give the ranks two
        # adapters.
        if any(info != infos[0] for info in infos):
            self._drop_new(infos)
            raise ValueError(f"{path}: the files changed while they were read; retry")
        self._kept.add(infos[0].digest)
        self._left.pop(infos[0].digest, None)
        return infos[0]

    def drop(self, digest: bytes) -> None:
        self._kept.discard(digest)
        self._left[digest] = None
        for each in list(self._left):
            self._try_to_drop(each)

    def _try_to_drop(self, digest: bytes) -> None:
        """Let all workers forget an adapter; the next drop tries again if that fails. What a worker holds too much only
        costs memory: it may not end any request."""
        try:
            self._executor.collective_rpc("drop_lora", digest)
        except WorkerLostError:
            pass  # new workers load only what is needed: the next step notices the loss
        except Exception as error:
            log.error("some workers may keep the adapter %s that nothing needs: %s", digest.hex(), error)
            return
        del self._left[digest]

    def _drop_new(self, infos: list[LoraInfo]) -> None:
        """Let the workers that have read an adapter which others have not forget it again."""
        for digest in dict.fromkeys(info.digest for info in infos):
            if digest not in self._kept:
                self.drop(digest)

"""Keeps the LoRA adapters of the hash worker: each changes the tokens of its requests."""

import zlib
from pathlib import Path

from ..data.lora import LoraInfo, read_adapter_files, read_rank
from ..data.lora_config import LoraConfig
from ..data.scheduler_output import SchedulerOutput


class HashLoras:
    """Checks that every request that is computed finds its adapter in a slot."""

    def __init__(self, config: LoraConfig) -> None:
        self._config = config
        self._loaded: set[bytes] = set()
        self._slots: list[bytes] = []
        self._of_requests: dict[str, bytes] = {}  # preempted ones included

    def load(self, path: Path) -> LoraInfo:
        """Read an adapter. Raises ``ValueError``."""
        files = read_adapter_files(path)
        rank = read_rank(files.config, self._config.max_lora_rank)
        self._loaded.add(files.digest)
        return LoraInfo(files.digest, rank)

    def drop(self, digest: bytes) -> None:
        """Forget an adapter."""
        self._loaded.discard(digest)

    def begin(self, step: SchedulerOutput) -> None:
        """Learn of the adapters of a step's requests, and of the slots."""
        for req_id in step.finished_req_ids:
            self._of_requests.pop(req_id, None)
        for new in step.scheduled_new_reqs:
            if new.adapter:
                self._of_requests[new.req_id] = new.adapter
        if step.lora_slots is not None:
            self._slots = step.lora_slots
            assert len(self._slots) <= self._config.max_loras
            assert self._loaded.issuperset(self._slots)
        if self._of_requests:
            used = {self._of_requests.get(req_id, b"") for req_id in step.num_scheduled_tokens} - {b""}
            assert used.issubset(self._slots), "a request is computed whose adapter has no slot"

    def mark_of(self, req_id: str) -> int:
        """Return the mark of a request's adapter."""
        return adapter_mark(self._of_requests.get(req_id, b""))


def adapter_mark(digest: bytes) -> int:
    """Return what is combined with each cached token of requests with this adapter; 0 for the base model."""
    return zlib.crc32(digest) >> 2 if digest else 0

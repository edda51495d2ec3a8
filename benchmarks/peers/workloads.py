"""Defines what every engine computes and reports: greedy, random token ids, end-of-sequence ignored."""

import random
from dataclasses import dataclass
from typing import Protocol

_EDGE = 10


@dataclass(frozen=True)
class Workload:
    """Describes requests with `shared` common and `unique` own prompt tokens and `output` new ones each."""

    name: str
    requests: int
    shared: int
    unique: int
    output: int
    adapters: int = 0
    """How many LoRA adapters the requests name in turn; 0: all of them use the base model."""

    @property
    def prompt_len(self) -> int:
        return self.shared + self.unique

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Return token ids. Another seed shares no prefix with this one, so that no repeat hits the last one's
        cache."""
        generator = random.Random(f"{self.name}/{seed}")
        edge = min(_EDGE, (vocab_size - 1) // 2)

        def ids(count: int) -> list[int]:
            return [generator.randrange(edge, vocab_size - edge) for _ in range(count)]

        shared = ids(self.shared)
        return [shared + ids(self.unique) for _ in range(self.requests)]


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("single-stream", requests=1, shared=0, unique=64, output=128),
        Workload("long-prompt", requests=1, shared=0, unique=512, output=8),
        Workload("batch", requests=32, shared=0, unique=128, output=128),
        Workload("shared-prefix", requests=32, shared=512, unique=32, output=32),
        Workload("first-token", requests=1, shared=0, unique=2048, output=2),
        Workload("lora", requests=8, shared=0, unique=32, output=32, adapters=4),
    )
}
DEFAULT_WORKLOADS = ("single-stream", "long-prompt", "batch", "shared-prefix")
"""The workloads that need nothing but a checkpoint with a context of 1,024 tokens."""
LORA_RANK = 16
"""Rank of the adapters of a workload."""


def adapter_paths(model: str, count: int) -> list[str]:
    """Return the directories of a checkpoint's first ``count`` adapters, in the layout of the peft library."""
    return [f"{model}-lora/{number}" for number in range(count)]


@dataclass(frozen=True)
class Timing:
    """Holds the times of one repeat, in seconds."""

    seconds: float
    output_tokens: int
    ttft: float | None = None
    """Single stream only: time to the first token."""
    decode_seconds: float | None = None
    """Single stream only: time from the first token to the last."""


class Adapter(Protocol):
    """Holds an engine with a model. It is made with the checkpoint's directory, threads, expected workloads and
    options."""

    version: str

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        """Answer all prompts as one batch, each with exactly `workload.output` tokens."""

    def close(self) -> None:
        """Release all resources."""

"""What every engine is given, and what it reports. Greedy, random token ids, end-of-sequence ignored."""

import random
from dataclasses import dataclass
from typing import Protocol

_EDGE = 10


@dataclass(frozen=True)
class Workload:
    """So many requests, each of `shared` common and `unique` own prompt tokens and `output` new ones."""

    name: str
    requests: int
    shared: int
    unique: int
    output: int

    @property
    def prompt_len(self) -> int:
        return self.shared + self.unique

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Token ids; another seed shares no prefix with this one, so that no repeat finds the last one's in a cache."""
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
        Workload("batch", requests=32, shared=0, unique=128, output=128),
        Workload("shared-prefix", requests=32, shared=512, unique=32, output=32),
    )
}


@dataclass(frozen=True)
class Timing:
    """One repeat, in seconds."""

    seconds: float
    output_tokens: int
    ttft: float | None = None
    """Single stream only: to the first token."""
    decode_seconds: float | None = None
    """Single stream only: from the first token to the last."""


class Adapter(Protocol):
    """An engine with a model loaded. Made with the checkpoint's directory, threads, workloads to expect and options."""

    version: str

    def run(self, workload: Workload, prompts: list[list[int]]) -> Timing:
        """Answers all prompts as one batch, each with exactly `workload.output` tokens."""

    def close(self) -> None:
        """Gives everything back."""

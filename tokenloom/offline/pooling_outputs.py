"""Defines the parameters and results of pooling in the offline API, with vLLM's names."""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

PoolingTaskName = Literal["embed", "classify", "score", "token_embed", "token_classify"]


@dataclass(frozen=True)
class PoolingParams:
    """Controls what is pooled from a prompt."""

    dimensions: int | None = None
    """How many numbers of each vector to keep (Matryoshka); None: all."""
    use_activation: bool | None = None
    """Whether vectors are normalized, and logits become probabilities; None: as the model says."""
    task: PoolingTaskName | None = None
    """What to return; only for :meth:`tokenloom.LLM.encode`."""


@dataclass(frozen=True)
class PoolingOutput:
    """What was pooled from a prompt."""

    data: torch.Tensor
    """float32 [], [n] or [tokens, n]"""


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """The probabilities of a prompt's classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    """The relevance of one text to another."""

    score: float


Output = TypeVar("Output", covariant=True)


@dataclass(frozen=True)
class PoolingRequestOutput(Generic[Output]):
    """One prompt and its result."""

    request_id: str
    outputs: Output
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]

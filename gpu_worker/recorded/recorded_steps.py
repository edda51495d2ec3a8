"""Defines what the runner needs of recordings of steps: those of kernel calls on a CPU, or graphs on a GPU."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..attention.attention_backend import KVCache
from ..batch.input_batch import StepInputs
from ..models.model import Model


class RecordedSteps(Protocol):
    """Computes steps of a model from recordings."""

    def compute(
        self, model: Model, inputs: StepInputs, kv_caches: list[KVCache], *, adapted: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step in which every token's logits are needed. Returns the last hidden states [T, hidden_size] and
        the logits [T, vocab], which hold until the next step; None: the step must be computed as ever. ``adapted``:
        rows have LoRA adapters."""

    @property
    def sizes_ahead(self) -> Sequence[int]:
        """Return the numbers of requests whose decode steps are worth recording before the first request."""

    def forget(self) -> None:
        """Drop all recordings: the weights or the KV caches are others from now on."""

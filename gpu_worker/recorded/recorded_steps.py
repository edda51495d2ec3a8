"""Defines what the runner needs of recordings of steps: those of kernel calls on a CPU, or graphs on a GPU."""

from typing import Protocol

from torch import Tensor

from ..attention.attention_backend import KVCache
from ..batch.input_batch import StepInputs
from ..cuda.device_link import Event
from ..cuda.device_rows import RowDraws
from ..models.model import Model


class RecordedSteps(Protocol):
    """Computes steps of a model from recordings."""

    @property
    def computes_every_step(self) -> bool:
        """Whether it also computes the steps that cannot be recorded, such as those whose experts are chosen by row."""

    @property
    def draws(self) -> RowDraws | None:
        """What the rows that draw in the latest step ask for, on the device; None: the host has to send it."""

    def compute(
        self, model: Model, inputs: StepInputs, kv_caches: list[KVCache], *, adapted: bool = False
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step. Returns the last hidden states [T, hidden_size] and the logits [S, vocab] of the rows that
        draw, which hold until the next step; None: the step must be computed as ever. ``adapted``: rows have LoRA
        adapters, or the choices of experts are reported."""

    def record_ahead(self, model: Model, kv_caches: list[KVCache]) -> None:
        """Make the recordings that are worth it before the first request."""

    def event(self) -> Event | None:
        """Return what occurs when the latest step has ended; None: it has, or nothing says so."""

    def forget(self) -> None:
        """Drop all recordings: the weights or the KV caches are others from now on."""

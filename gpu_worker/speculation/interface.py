"""Defines what proposes drafts."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from tokenloom.engine_core.data.scheduler_output import SchedulerOutput

from ..attention.attention_backend import IntArray
from ..batch.input_batch import Ints, StepInputs

StepArrays = tuple[IntArray, IntArray, IntArray, IntArray]
"""The arguments of :meth:`AttentionBackend.plan`."""


class Proposer(Protocol):
    """Proposes the tokens that may follow the last one of a request."""

    def update(self, step: SchedulerOutput) -> None:
        """Forget requests that ended or were preempted, and those that begin or resume."""

    def propose(self, step: StepInputs, hidden: Tensor, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """Return drafts of requests of ``step``: at most ``wanted[request]`` of each, none of one that is not named.

        The step's tokens are drawn and appended to the batch. ``hidden`` [T, hidden_size] holds the model's last hidden
        states of the step's tokens. Called after every step, with requests that want drafts or without.
        """

    def make_kv_caches(self) -> None:
        """Allocate empty KV caches, if there are none."""

    def drop_kv_caches(self) -> None:
        """Drop the KV caches with their content; no step may run before :meth:`make_kv_caches`."""

    def dummy_run(self, positions: Ints, hidden: Tensor, plan: StepArrays) -> None:
        """Compute what follows a step of the model, for a profile.

        ``positions`` [T] are the tokens', ``hidden`` [T, hidden_size] the model's last hidden states.
        """

"""Runs the steps of what drafts from recordings."""

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionBackend, AttentionPlan, KVCache
from ..batch.input_batch import InputBatch, StepInputs
from ..cpu_graphs.fixed_plan import FixedPlan, make_fixed_plan
from ..cpu_graphs.recorded_model import RecordedModel
from .drafter import Drafter

MOST_TOKENS = 32
"""Larger steps are those of prompts, of which only the last rows' logits are needed."""


class RecordedDrafter:
    """Holds the recordings of a drafter over its attention backend."""

    def __init__(self, plan: FixedPlan) -> None:
        self._recorded = RecordedModel(plan)
        self._states: Tensor | None = None
        """[MOST_TOKENS, hidden_size]: what recorded steps read as the states before their tokens."""

    @property
    def num_recordings(self) -> int:
        """Return how many sizes of steps are recorded."""
        return self._recorded.num_recordings

    def forget(self) -> None:
        """Drop all recordings: the weights or the KV caches are others from now on."""
        self._recorded.forget()

    def compute(
        self, drafter: Drafter, inputs: StepInputs, states: Tensor | None, kv_caches: list[KVCache]
    ) -> tuple[Tensor, Tensor] | None:
        """Compute a step as :meth:`Drafter.forward` and :meth:`Drafter.compute_logits` do, for all of its T tokens.

        Returns [T, hidden_size] and [T, vocab], which hold until the next step; None: it must be computed as ever.
        """
        num_tokens = len(inputs.token_ids)
        if num_tokens > MOST_TOKENS:
            return None
        if states is not None:
            if self._states is None:
                self._states = torch.zeros(MOST_TOKENS, states.shape[1], dtype=states.dtype)
            self._states[:num_tokens] = states
        return self._recorded.compute(_Model(drafter, self._states), inputs, kv_caches, every_row=True)


class _Model:
    """Computes a drafter's steps from states that stay where they are. Fulfils :class:`StepModel`."""

    def __init__(self, drafter: Drafter, states: Tensor | None) -> None:
        self._drafter = drafter
        self._states = states

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], plan: AttentionPlan) -> Tensor:
        states = None if self._states is None else self._states[: len(input_ids)]
        return self._drafter.forward(input_ids, positions, states, kv_caches, plan)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._drafter.compute_logits(hidden)


def make_recorded_drafter(backend: AttentionBackend, batch: InputBatch) -> RecordedDrafter | None:
    """Return what records the steps of a drafter for a batch; None: the backend's steps are not recorded."""
    table = batch.block_table
    plan = make_fixed_plan(backend, MOST_TOKENS, table.block_ids.shape[1] // table.num_groups)
    return None if plan is None else RecordedDrafter(plan)

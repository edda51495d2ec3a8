"""Defines what a small model does to propose tokens, lets a model of its own do it, and runs the steps of what drafts
from recordings."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..attention.attention_backend import AttentionBackend, AttentionPlan, KVCache
from ..batch.input_batch import InputBatch, Ints, StepInputs
from ..cpu_graphs.fixed_plan import FixedPlan, make_fixed_plan
from ..cpu_graphs.recorded_model import RecordedModel
from ..models.model import LanguageModel
from .greedy_drafts import DraftRange, GreedyDrafts, StateAddresses


class Drafter(Protocol):
    """Computes one token after the other, with KV caches of its own in the blocks of the request."""

    @property
    def keeps_drafts(self) -> bool:
        """Whether the KV of a draft is that of the same token once it is accepted."""

    @property
    def at_once(self) -> GreedyDrafts | None:
        """Return what drafts for greedy requests in one call, with the same KV caches; None: :meth:`forward` does."""

    def states(self, step: StepInputs, hidden: Tensor, places: Ints, inputs: StepInputs) -> Tensor | None:
        """Return what :meth:`forward` needs of the model for ``inputs``, or None: the states before their tokens.

        ``hidden`` [T, hidden_size] are the model's last hidden states of ``step``; ``inputs`` belong to its requests
        ``places``.
        """

    def state_addresses(
        self, step: StepInputs, hidden: Tensor, places: Sequence[int], ranges: Sequence[DraftRange]
    ) -> list[StateAddresses]:
        """Return where :attr:`at_once` finds the same states for these ranges, of the requests ``places``; empty: it
        needs none. They hold as long as ``hidden``."""

    def keep(self, step: StepInputs, hidden: Tensor, places: Sequence[int], computed: Sequence[int]) -> None:
        """Remember what :meth:`states` needs after the next step of the requests ``places`` of ``step``, which get no
        drafts. ``computed``: how many tokens of each the model has computed."""

    def forget(self, req_ids: Sequence[str]) -> None:
        """Drop what is known of these requests."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor | None, kv_caches: list[KVCache], plan: AttentionPlan
    ) -> Tensor:
        """Compute T tokens like :meth:`..models.model.LanguageModel.forward`. ``states`` [T, hidden_size]: those of
        :meth:`states`, and for a token after a draft what this method returned for the token before it."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Turn what :meth:`forward` returned into float32 logits [R, vocab_size]."""


class DraftModel:
    """Fulfils :class:`~.drafter.Drafter`."""

    keeps_drafts = True

    def __init__(self, model: LanguageModel, at_once: GreedyDrafts | None = None) -> None:
        self._model = model
        self.at_once = at_once

    def states(self, step: StepInputs, hidden: Tensor, places: Ints, inputs: StepInputs) -> None:
        return None

    def state_addresses(
        self, step: StepInputs, hidden: Tensor, places: Sequence[int], ranges: Sequence[DraftRange]
    ) -> list[StateAddresses]:
        return []

    def keep(self, step: StepInputs, hidden: Tensor, places: Sequence[int], computed: Sequence[int]) -> None:
        pass

    def forget(self, req_ids: Sequence[str]) -> None:
        pass

    def forward(
        self, input_ids: Tensor, positions: Tensor, states: Tensor | None, kv_caches: list[KVCache], plan: AttentionPlan
    ) -> Tensor:
        return self._model.forward(input_ids, positions, kv_caches, plan)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden)


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

"""Defines what a small model does to propose tokens, and lets a model of its own do it."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..batch.input_batch import Ints, StepInputs
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
        """Compute T tokens like :meth:`Model.forward`. ``states`` [T, hidden_size]: those of :meth:`states`, and for a
        token after a draft what this method returned for the token before it."""

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

"""Drafts with a smaller model of the same vocabulary."""

from collections.abc import Sequence

from torch import Tensor

from ..attention.attention_backend import AttentionPlan, KVCache
from ..batch.input_batch import Ints, StepInputs
from ..models.model import LanguageModel
from .greedy_drafts import DraftRange, GreedyDrafts, StateAddresses


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

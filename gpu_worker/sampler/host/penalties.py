"""Applies repetition, presence and frequency penalties to the tokens that a request has seen."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .row_edit import RowEdit
from .seen_tokens import SeenTokens


class Penalties:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("presence_penalty", "frequency_penalty", "repetition_penalty")

    def __init__(self) -> None:
        self._seen: dict[int, tuple[SeenTokens, SamplingParams]] = {}

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._seen[row] = SeenTokens(prompt_token_ids, output_token_ids), params

    def remove(self, row: int) -> None:
        del self._seen[row]

    def append(self, row: int, token_id: int) -> None:
        self._seen[row][0].append(token_id)

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, (seen, params) in self._seen.items():
            if (index := index_of.get(row)) is not None:
                seen.penalize(logits[index], params)

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.penalties = self._seen[row]

    def follows_output(self, row: int) -> bool:
        return False

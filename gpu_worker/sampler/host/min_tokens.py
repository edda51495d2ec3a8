"""Applies ``min_tokens``: no stop token is drawn before the output has that many tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .row_edit import RowEdit


class MinTokens:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("min_tokens",)

    def __init__(self) -> None:
        self._stop_token_ids: dict[int, npt.NDArray[np.int64]] = {}
        self._num_missing: dict[int, int] = {}
        self._min_tokens: dict[int, int] = {}

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._stop_token_ids[row] = np.array(params.stop_token_ids or (), dtype=np.int64)
        self._min_tokens[row] = params.min_tokens
        self._num_missing[row] = params.min_tokens - len(output_token_ids)

    def remove(self, row: int) -> None:
        del self._stop_token_ids[row], self._num_missing[row], self._min_tokens[row]

    def append(self, row: int, token_id: int) -> None:
        self._num_missing[row] -= 1

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, num_missing in self._num_missing.items():
            if num_missing > 0 and (index := index_of.get(row)) is not None:
                logits[index, self._stop_token_ids[row]] = -np.inf

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if output_index < self._min_tokens[row]:
            edit.masked.append(self._stop_token_ids[row])

    def follows_output(self, row: int) -> bool:
        return False

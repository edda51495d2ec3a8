"""Applies ``allowed_token_ids``: no other token may be drawn."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .row_edit import RowEdit, Words, pack_bits


class AllowedTokens:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("allowed_token_ids",)

    def __init__(self) -> None:
        self._token_ids: dict[int, npt.NDArray[np.int64]] = {}
        self._bitmasks: dict[int, Words] = {}

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        self._token_ids[row] = np.array(params.allowed_token_ids, dtype=np.int64)

    def remove(self, row: int) -> None:
        del self._token_ids[row]
        self._bitmasks.pop(row, None)

    def append(self, row: int, token_id: int) -> None:
        pass

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, token_ids in self._token_ids.items():
            if (index := index_of.get(row)) is not None:
                allowed = logits[index, token_ids]
                logits[index] = -np.inf
                logits[index, token_ids] = allowed

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        if row not in self._bitmasks:
            self._bitmasks[row] = pack_bits(self._token_ids[row])
        edit.allowed.append(self._bitmasks[row])

    def follows_output(self, row: int) -> bool:
        return False

"""Applies ``logit_bias``, which is added to the logits of single tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

from .row_edit import RowEdit


class LogitBias:
    """Fulfils :class:`~.logits_processor.LogitsProcessor`."""

    parameters: tuple[str, ...] = ("logit_bias",)

    def __init__(self) -> None:
        self._biases: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        bias = params.logit_bias or {}
        self._biases[row] = (
            np.fromiter(bias.keys(), dtype=np.int64, count=len(bias)),
            np.fromiter(bias.values(), dtype=np.float32, count=len(bias)),
        )

    def remove(self, row: int) -> None:
        del self._biases[row]

    def append(self, row: int, token_id: int) -> None:
        pass

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        for row, (token_ids, biases) in self._biases.items():
            if (index := index_of.get(row)) is not None:
                logits[index, token_ids] += biases

    def describe(self, row: int, output_index: int, edit: RowEdit) -> None:
        edit.bias = self._biases[row]

    def follows_output(self, row: int) -> bool:
        return False

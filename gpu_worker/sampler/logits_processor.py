"""The seam for all that changes logits before a token is drawn: batch-wise, and free while nobody asks for it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams


class LogitsProcessor(Protocol):
    """One kind of change. It keeps what it must know of the batch rows whose requests ask for it, and of no others."""

    def is_wanted(self, params: SamplingParams) -> bool:
        """Whether a request of these parameters asks for it."""

    def add(
        self, row: int, params: SamplingParams, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]
    ) -> None:
        """A request that asks for it joins, or comes back from a preemption with the output it had."""

    def remove(self, row: int) -> None:
        """It leaves."""

    def append(self, row: int, token_id: int) -> None:
        """It gained an output token."""

    def apply(self, logits: npt.NDArray[np.float32], index_of: Mapping[int, int]) -> None:
        """Changes logits [n, vocab] in place: those at ``index_of[row]``, of its own rows among these."""


class LogitsProcessors:
    """All kinds, in the order in which they apply. A step in which no row asks for any costs one look at a dict."""

    def __init__(self, in_order: Sequence[LogitsProcessor]) -> None:
        self._in_order = tuple(in_order)
        self._of_row: dict[int, list[LogitsProcessor]] = {}

    def __bool__(self) -> bool:
        """Whether any row asks for one."""
        return bool(self._of_row)

    def add(self, row: int, params: SamplingParams, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request joins with these tokens, of which the first are its prompt."""
        wanted = [processor for processor in self._in_order if processor.is_wanted(params)]
        if wanted:
            self._of_row[row] = wanted
            for processor in wanted:
                processor.add(row, params, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])

    def remove(self, row: int) -> None:
        """It leaves."""
        for processor in self._of_row.pop(row, ()):
            processor.remove(row)

    def append(self, rows: npt.NDArray[np.int64], token_ids: npt.NDArray[np.int64]) -> None:
        """These rows, [n], gained an output token each."""
        if not self._of_row:
            return
        for row, token_id in zip(rows.tolist(), token_ids.tolist(), strict=True):
            for processor in self._of_row.get(row, ()):
                processor.append(row, token_id)

    def apply(self, logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int64]) -> None:
        """Changes logits [n, vocab] of these batch rows, [n], in place."""
        if not self._of_row:
            return
        index_of = {row: index for index, row in enumerate(rows.tolist()) if row in self._of_row}
        if index_of:
            for processor in self._in_order:
                processor.apply(logits, index_of)

"""Holds the rows of the batch that are pooled, with what was computed of their prompts."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.data.core_pooling_params import PoolingParams

from .pooler import Pooler, PromptStates

Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class _Prompt:
    params: PoolingParams
    num_tokens: int
    states: PromptStates | None = None


class PooledRows:
    """Holds the batch rows whose prompts are pooled. A step without such rows costs one dict lookup."""

    def __init__(self) -> None:
        self._prompts: dict[int, _Prompt] = {}

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def add(self, row: int, params: PoolingParams, num_tokens: int) -> None:
        """Add a prompt, also when it comes back from a preemption."""
        self._prompts[row] = _Prompt(params, num_tokens)

    def remove(self, row: int) -> None:
        """Drop a row, if it is pooled."""
        self._prompts.pop(row, None)

    def pool(
        self, pooler: Pooler, rows: list[int], ends: list[int], cu_query_lens: list[int], hidden: Tensor
    ) -> dict[int, Floats]:
        """Add the states of a step. Returns the results of prompts that are complete, by index in the step.

        Args:
            rows: [R] the rows of the step.
            ends: [R] how many tokens of each are computed after the step.
            cu_query_lens: [R + 1] where the tokens of each begin.
            hidden: [T, hidden_size]
        """
        results = {}
        for index, row in enumerate(rows):
            if (prompt := self._prompts.get(row)) is None:
                continue
            if prompt.states is None:
                prompt.states = pooler.start(prompt.params)
            prompt.states.add(hidden[cu_query_lens[index] : cu_query_lens[index + 1]])
            if ends[index] == prompt.num_tokens:
                results[index] = pooler.finish(prompt.states, prompt.params)
        return results

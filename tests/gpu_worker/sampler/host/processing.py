"""Runs one row through the processors, as the model runner does with a batch."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tokenloom.engine_core.data.core_params import CoreSamplingParams
from tokenloom.gpu_worker.sampler.host.logits_processors import make_logits_processors
from tokenloom.gpu_worker.sampler.host.sampler import Sampler

ROW = 3


class OneRow:
    """A request of these parameters in batch row 3, between rows that ask for nothing."""

    def __init__(self, prompt: Sequence[int] = (0,), output: Sequence[int] = (), **values: object) -> None:
        self._processors = make_logits_processors()
        params = CoreSamplingParams(max_tokens=100, seed=1, **values)
        self._processors.add(ROW, params, [*prompt, *output], len(prompt))

    def append(self, token_id: int) -> None:
        self._processors.append(np.array([0, ROW]), np.array([1, token_id]))

    def apply(self, logits: Sequence[float]) -> list[float]:
        """The row's logits afterwards; fails if a neighbour's change."""
        batch = np.tile(np.array(logits, dtype=np.float32), (3, 1))
        self._processors.apply(batch, np.array([0, ROW, 1]))
        assert (batch[[0, 2]] == np.array(logits, dtype=np.float32)).all()
        return batch[1].tolist()

    def masked(self, vocab: int) -> set[int]:
        """Tokens of which nothing is left."""
        return {token for token, logit in enumerate(self.apply([0.0] * vocab)) if logit == -np.inf}


class Row(NamedTuple):
    """How a row of logits is sampled."""

    params: CoreSamplingParams
    output_index: int


def sample(logits: np.ndarray, rows: Sequence[Row]) -> list[int]:
    """The token of each row of logits, [rows, vocab]."""
    return Sampler().sample(logits, [row.params for row in rows], np.array([row.output_index for row in rows]))

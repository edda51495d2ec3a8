"""Which log probabilities the rows of a step ask for, in columns, and what the device answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tokenloom.engine_core.data.messages import Logprobs

MOST_LISTED = 1024
"""Tokens of one row whose log probabilities the device lists; a row that asks for more comes to the host."""

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class LogprobArrays:
    """Holds what ``kernels.triton.logprobs`` reads, a place for each row that asks."""

    rows: npt.NDArray[np.int64]
    """[asking]: rows of the logits."""
    num_tops: Int32s
    """[asking]: how many of the best tokens are wanted."""
    also_starts: Int32s
    """[asking + 1]: where the named tokens of each row begin in ``also_ids``."""
    also_ids: Int32s

    @classmethod
    def of(cls, rows: Sequence[int], wanted: Sequence[tuple[int, Sequence[int]]], vocab: int) -> Self:
        """Put into columns how many of the best tokens each row asks for, and which it names."""
        lengths = [len(named) for _, named in wanted]
        return cls(
            rows=np.array(rows, dtype=np.int64),
            num_tops=np.array([min(num_top, vocab) for num_top, _ in wanted], dtype=np.int32),
            also_starts=np.cumsum([0, *lengths], dtype=np.int32),
            also_ids=np.array([token_id for _, named in wanted for token_id in named], dtype=np.int32),
        )

    @property
    def listed(self) -> Int32s:
        """Return how many tokens each row lists, [asking], without its own."""
        return self.num_tops + np.diff(self.also_starts)

    def in_order(self) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays in the order of the fields."""
        return self.rows, self.num_tops, self.also_starts, self.also_ids


@dataclass(frozen=True, slots=True)
class FoundLogprobs:
    """Holds what the device found, on the device or on the host; n rows ask, and K is the most tokens of a row."""

    token_ids: Tensor
    """[n, 1 + K] int32: the row's token, the best tokens by ascending id, and those that it names."""
    logits: Tensor
    """[n, 1 + K] float32, of the same tokens."""
    ranks: Tensor
    """[n] int32 of the row's token."""
    normalizers: Tensor
    """[n] float64: the logarithm of the sum of exponentials; NaN if the largest logit is not finite."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.token_ids, self.logits, self.ranks, self.normalizers

    def read(self, arrays: LogprobArrays) -> list[Logprobs]:
        """Return one position for each row that asks, from results on the host."""
        ids, logits, ranks, normalizers = (tensor.numpy() for tensor in self.tensors())
        columns = zip(arrays.num_tops.tolist(), arrays.listed.tolist(), ranks.tolist(), strict=True)
        return [
            _position(ids[place, : 1 + listed], logits[place, : 1 + listed], num_top, rank, normalizers[place])
            for place, (num_top, listed, rank) in enumerate(columns)
        ]


def _position(
    ids: Int32s, logits: npt.NDArray[np.float32], num_top: int, rank: int, normalizer: np.float64
) -> Logprobs:
    best = 1 + np.argsort(-logits[1 : 1 + num_top], kind="stable")  # the lower id stays first
    listed = ids[np.concatenate([best, np.arange(1 + num_top, len(ids))])]
    values = logits[np.concatenate([[0], best, np.arange(1 + num_top, len(ids))])].astype(np.float64) - normalizer
    if np.isnan(normalizer):  # there is no order: the first tokens stand for the best
        listed[:num_top] = np.arange(num_top)
        values[:] = np.nan
    sampled, *others = values.tolist()
    return Logprobs([sampled], [rank], len(listed), listed.tolist(), others)

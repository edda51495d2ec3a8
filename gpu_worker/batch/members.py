"""Holds the requests of a step, which the steps after it compute too until one begins or ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.wire.core_sampling_params import SamplingParams

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Members:
    """Holds what all steps share that compute the same requests in the same order. Nothing in it changes."""

    req_ids: list[str]
    rows: Ints
    """[R]: their rows of the input batch."""
    rows_at: int
    """The address of ``rows``."""
    params: list[SamplingParams]
    """[R]"""
    are_greedy: bool
    """Whether all take the tokens of the largest logits."""

    @classmethod
    def find(cls, req_ids: list[str], row_of: Mapping[str, int], params: Mapping[int, SamplingParams]) -> Self:
        """Look up the rows of these requests, and the parameters of the rows."""
        rows = np.array([row_of[req_id] for req_id in req_ids], dtype=np.int64)
        wanted = [params[row] for row in rows.tolist()]
        return cls(req_ids, rows, rows.ctypes.data, wanted, all(each.temperature == 0.0 for each in wanted))

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
    params: list[SamplingParams]
    """[R]"""
    places: Ints
    """[R]: the numbers from 0 on."""
    query_starts: npt.NDArray[np.int32]
    """[R + 1]: where each request's tokens begin, if each computes one."""

    @classmethod
    def find(cls, req_ids: list[str], row_of: Mapping[str, int], params: Mapping[int, SamplingParams]) -> Self:
        """Look up the rows of these requests, and the parameters of the rows."""
        rows, count = [row_of[req_id] for req_id in req_ids], len(req_ids)
        query_starts = np.arange(count + 1, dtype=np.int32)
        params_of_rows = [params[row] for row in rows]
        return cls(req_ids, np.array(rows, dtype=np.int64), params_of_rows, np.arange(count), query_starts)

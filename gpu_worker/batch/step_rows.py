"""Holds the requests of a step, which the steps after it compute too until one begins or ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_sampling_params import SamplingParams

Ints = npt.NDArray[np.int64]

_DRAW = np.dtype(
    [("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("seed", "u8")]
)  # mirrors the struct in ``draw.cpp``


@dataclass(frozen=True, slots=True)
class StepRows:
    """Holds what all steps share that compute the same requests in the same order. Nothing in it changes."""

    req_ids: list[str]
    rows: Ints
    """[R]: their rows of the input batch."""
    rows_at: int
    """The address of ``rows``."""
    params: list[SamplingParams]
    """[R]"""
    draws: npt.NDArray[Any] | None
    """[R]: of ``params``, what says how tokens are drawn; None: all take those of the largest logits."""
    draws_at: int | None
    """The address of ``draws``."""

    @classmethod
    def find(cls, req_ids: list[str], row_of: Mapping[str, int], params: Mapping[int, SamplingParams]) -> Self:
        """Look up the rows of these requests, and the parameters of the rows."""
        rows = np.array([row_of[req_id] for req_id in req_ids], dtype=np.int64)
        wanted = [params[row] for row in rows.tolist()]
        draws = _draws_of(wanted)
        return cls(req_ids, rows, rows.ctypes.data, wanted, draws, None if draws is None else draws.ctypes.data)


def _draws_of(params: Sequence[SamplingParams]) -> npt.NDArray[Any] | None:
    if all(each.temperature == 0.0 for each in params):
        return None
    return np.array([(p.temperature, p.top_p, p.min_p, p.top_k, p.seed) for p in params], dtype=_DRAW)

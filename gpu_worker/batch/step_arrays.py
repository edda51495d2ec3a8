"""What steps share: the rows of their requests, and the memory of their arrays.

The memory stays where it is, because recorded kernels read every step from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tokenloom.engine_core.data.core_params import CoreSamplingParams

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """Holds what ``StepInputs`` shows the beginnings of, for up to so many tokens [n] of so many requests [n].

    Each array owns its memory, so it is the ``base`` of its parts.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    query_starts: Int32s
    """[n + 1]"""
    seq_lens: Int32s
    block_tables: Int32s
    """[n, most blocks of a request]"""

    @classmethod
    def allocate(cls, most: int, most_blocks: int) -> Self:
        """Allocate arrays of zeros; memory that no step touches is never mapped."""
        token_ids, positions, slots = (np.zeros(most, dtype=np.int64) for _ in range(3))
        query_starts, seq_lens = (np.zeros(most + more, dtype=np.int32) for more in (1, 0))
        block_tables = np.zeros((most, most_blocks), dtype=np.int32)
        return cls(token_ids, positions, slots, query_starts, seq_lens, block_tables)


_DRAW = np.dtype(
    [("temperature", "f8"), ("top_p", "f8"), ("min_p", "f8"), ("top_k", "i8"), ("seed", "u8")]
)  # mirrors the struct in ``draw.cpp``

_TEMPERATURE = attrgetter("temperature")


@dataclass(frozen=True, slots=True)
class StepRows:
    """Holds what all steps share that compute the same requests in the same order. Nothing in it changes."""

    req_ids: list[str]
    rows: Ints
    """[R]: their rows of the input batch."""
    rows_at: int
    """The address of ``rows``."""
    params: list[CoreSamplingParams]
    """[R]"""
    draws: npt.NDArray[Any] | None
    """[R]: of ``params``, what says how tokens are drawn; None: all take those of the largest logits."""
    draws_at: int | None
    """The address of ``draws``."""

    @classmethod
    def find(cls, req_ids: list[str], row_of: Mapping[str, int], params: Mapping[int, CoreSamplingParams]) -> Self:
        """Look up the rows of these requests, and the parameters of the rows."""
        numbers = list(map(row_of.__getitem__, req_ids))
        rows, wanted = np.array(numbers, dtype=np.int64), list(map(params.__getitem__, numbers))
        draws = None
        if any(map(_TEMPERATURE, wanted)):
            draws = np.array([(p.temperature, p.top_p, p.min_p, p.top_k, p.seed) for p in wanted], dtype=_DRAW)
        return cls(req_ids, rows, rows.ctypes.data, wanted, draws, None if draws is None else draws.ctypes.data)

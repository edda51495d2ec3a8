"""Holds the memory of a step's arrays, which stays where it is: recorded kernels read every step from there."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

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

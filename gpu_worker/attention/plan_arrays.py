"""Holds the arrays of a step as the attention kernels read them."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .attention_backend import IntArray
from .shared_prefix import Int32s, SharedPrefixes, SharedPrefixFinder


@dataclass(slots=True)
class PlanArrays:
    """Holds one step's arrays; see :meth:`.attention_backend.AttentionBackend.plan`."""

    query_starts: Int32s
    """[n + 1]"""
    seq_lens: Int32s
    """[n]"""
    block_tables: Int32s
    """[n, width]"""
    slots: Tensor
    """[T] int64."""
    prefixes: SharedPrefixes
    num_requests: int
    num_groups: int
    """How many groups of requests ``prefixes`` lists."""

    @classmethod
    def copied(
        cls,
        cu_query_lens: IntArray,
        seq_lens: IntArray,
        block_tables: IntArray,
        slot_mapping: IntArray,
        finder: SharedPrefixFinder,
    ) -> Self:
        """Copy the arrays of a step, because the caller may reuse them."""
        tables, lengths = _int32(block_tables), _int32(seq_lens)
        prefixes = finder.find(np.diff(cu_query_lens), lengths, tables)
        slots = torch.from_numpy(slot_mapping.astype(np.int64))
        return cls(_int32(cu_query_lens), lengths, tables, slots, prefixes, len(lengths), len(prefixes.lengths))


def _int32(values: IntArray) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32, order="C")

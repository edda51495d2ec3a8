"""Gathers the arrays of a step with one call of a kernel."""

from collections.abc import Collection
from ctypes import byref
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import GatherArgs, load_batch
from .block_table import BlockTable
from .members import Members

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]
_FEW_TOKENS = 256
"""Room for so many is allocated ahead."""


class Gathered(NamedTuple):
    """Holds the arrays of a step, as ``StepInputs`` does. The next step overwrites them."""

    token_ids: Ints
    positions: Ints
    cu_query_lens: Int32s
    seq_lens: Int32s
    block_tables: Int32s
    slot_mapping: Ints
    sampled: Ints


class Gatherer:
    """Belongs to a batch without groups of layers, whose arrays never move."""

    def __init__(self, tokens: Int32s, computed: Ints, known: Ints, table: BlockTable) -> None:
        """The first three are the batch's token ids, and how many tokens of each row are computed and known.

        Raises :class:`KernelsUnavailable`.
        """
        self._gather = load_batch().gather
        tables, num_blocks = table.block_ids, table.num_blocks
        most = len(tables)
        self._inputs = (tokens, computed, known, tables, num_blocks)
        self._lengths, self._sampled = np.ones(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        self._starts, self._seq_lens = np.empty(most + 1, dtype=np.int32), np.empty(most, dtype=np.int32)
        self._tables = np.empty(tables.size, dtype=np.int32)  # memory that no step touches is never mapped
        self._args = GatherArgs(
            *(each.ctypes.data for each in self._inputs),
            lengths=self._lengths.ctypes.data,
            query_starts=self._starts.ctypes.data,
            seq_lens=self._seq_lens.ctypes.data,
            block_tables=self._tables.ctypes.data,
            sampled=self._sampled.ctypes.data,
            tokens_stride=tokens.shape[1],
            tables_stride=tables.shape[1],
            block_size=table.block_size,
        )
        self._where = byref(self._args)
        self._make_room(_FEW_TOKENS)

    def gather(self, members: Members, lengths: Collection[int]) -> Gathered:
        """Gather the arrays of a step that computes so many tokens of each of these requests."""
        args, count, num_tokens = self._args, len(lengths), sum(lengths)
        if num_tokens > len(self._token_ids):
            self._make_room(2 * num_tokens)
        self._lengths[:count] = 1 if num_tokens == count else list(lengths)
        args.rows, args.num_requests = members.rows_at, count
        self._gather(self._where)
        width = args.width
        return Gathered(
            self._token_ids[:num_tokens],
            self._positions[:num_tokens],
            self._starts[: count + 1],
            self._seq_lens[:count],
            self._tables[: count * width].reshape(count, width),
            self._slots[:num_tokens],
            self._sampled[: args.num_sampled],
        )

    def _make_room(self, num_tokens: int) -> None:
        self._token_ids, self._positions, self._slots = np.empty((3, num_tokens), dtype=np.int64)
        args = self._args
        args.token_ids, args.positions = self._token_ids.ctypes.data, self._positions.ctypes.data
        args.slots = self._slots.ctypes.data


def make_gatherer(tokens: Int32s, computed: Ints, known: Ints, table: BlockTable) -> Gatherer | None:
    """Return the gatherer of a batch; None: numpy gathers."""
    if table.num_groups > 1:
        return None
    try:
        return Gatherer(tokens, computed, known, table)
    except KernelsUnavailable:
        return None

"""The arrays of a batch: where each row's KV is, its blocks in order. Gathers the arrays of a step, and samples its
tokens and appends them to the batch, each with one call of a kernel.

What steps share, the rows of their requests and the memory of their arrays, stays where it is, because recorded kernels
read every step from there.
"""

from collections.abc import Collection, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokenloom.engine_core.data.core_params import CoreSamplingParams

from ..kernels.compiler import KernelsUnavailable
from ..kernels.library import DrawArgs, GatherArgs, load_batch, load_draw
from ..kernels.threads import kernel_threads
from ..sampler.host.sampler import REAL_PARAMETERS, real_parameters

Ints = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]


class RowChanges:
    """Holds what changed since it was taken last: the latest value of each place."""

    def __init__(self) -> None:
        self._blocks: dict[int, int] = {}
        self._rows: dict[int, None] = {}

    def add_blocks(self, start: int, block_ids: Sequence[int]) -> None:
        """Note block ids that were written from place ``start`` on: row * columns + column of the block table."""
        self._blocks.update(zip(range(start, start + len(block_ids)), block_ids, strict=True))

    def add_row(self, row: int) -> None:
        """Note that a request got this row."""
        self._rows[row] = None

    def take_blocks(self) -> tuple[Ints, npt.NDArray[np.int32]]:
        """Return places [n] and their block ids [n], which have changed, and forget them."""
        blocks, self._blocks = self._blocks, {}
        places = np.fromiter(blocks, dtype=np.int64, count=len(blocks))
        return places, np.fromiter(blocks.values(), dtype=np.int32, count=len(blocks))

    def take_rows(self) -> list[int]:
        """Return the rows that requests got, and forget them."""
        rows, self._rows = list(self._rows), {}
        return rows


class BlockTable:
    """Holds the block ids of every row of the input batch, [max_num_seqs, blocks of the longest request] int32.

    A slot is ``block id * block_size + position in the block``, the index of a token in the KV pool. Column
    ``index * num_groups + group`` is the block of that group of layers for the block of tokens ``index``.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int = 1, num_blocks: int = 1 << 31
    ) -> None:
        """``num_blocks``: those of the cache; the ids are below it."""
        self.num_blocks_in_all = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        self.block_ids = np.zeros((max_num_seqs, -(-max_model_len // block_size) * num_groups), dtype=np.int32)
        """The tables of all rows, as they are at any later time."""
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        """How many blocks each row has, as they are at any later time."""
        self.changes: RowChanges | None = None
        """Collects what is written; None: no device keeps a copy."""

    def replace(self, row: int, block_ids: Sequence[int]) -> None:
        """Replace the whole table of a row."""
        self.num_blocks[row] = 0
        self.append(row, block_ids)

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        if block_ids:
            start = self.num_blocks[row]
            self.num_blocks[row] = start + len(block_ids)
            self.block_ids[row, start : self.num_blocks[row]] = block_ids
            if len(block_ids) > 1:  # the kernel that gathers a step looks at those of its tokens alone
                assert 0 <= min(block_ids) <= max(block_ids) < self.num_blocks_in_all, (
                    f"no blocks of the cache: {block_ids}"
                )
            if self.changes is not None:
                self.changes.add_blocks(row * self.block_ids.shape[1] + int(start), block_ids)

    def gather(self, rows: Ints) -> npt.NDArray[np.int32]:
        """Return the tables of these rows, [n, blocks of the longest]. Entries beyond a row's count are undefined."""
        return self.block_ids[rows, : self.num_blocks[rows].max(initial=0)]

    def num_slots(self, row: int) -> int:
        """Return how many tokens the blocks of a row hold."""
        return self.num_blocks.item(row) // self.num_groups * self.block_size

    def num_slots_of(self, rows: Ints) -> Ints:
        """Return how many tokens the blocks of these rows hold, [n]."""
        return self.num_blocks[rows] // self.num_groups * self.block_size

    def slots(self, rows: Ints, positions: Ints) -> Ints:
        """Return the slots of n (row, position) pairs, [n], or [num_groups, n] if there are several groups."""
        columns = positions // self.block_size
        if self.num_groups > 1:
            columns = columns * self.num_groups + np.arange(self.num_groups)[:, None]
        block_ids = self.block_ids[rows, columns].astype(np.int64)
        return block_ids * self.block_size + positions % self.block_size


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


# Mirrors the struct in ``draw.cpp``.
_DRAW = np.dtype([*((name, "f8") for name in REAL_PARAMETERS), ("top_k", "i8"), ("seed", "u8")])

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
            draws = np.array([(*real_parameters(each), each.top_k, each.seed) for each in wanted], dtype=_DRAW)
        return cls(req_ids, rows, rows.ctypes.data, wanted, draws, None if draws is None else draws.ctypes.data)


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
        most = max(len(tables), _FEW_TOKENS)
        self._inputs = (tokens, computed, known, tables, num_blocks)
        self._lengths, self._sampled = np.ones(most, dtype=np.int64), np.empty(most, dtype=np.int64)
        self.arrays = arrays = StepArrays.allocate(most, tables.shape[1])
        """Where steps of up to so many tokens lie; of larger ones, only the arrays of requests."""
        self._few = self._in_use = (arrays.token_ids, arrays.positions, arrays.slots)
        self._many = self._few
        self._args = GatherArgs(
            *(each.ctypes.data for each in self._inputs),
            lengths=self._lengths.ctypes.data,
            query_starts=arrays.query_starts.ctypes.data,
            seq_lens=arrays.seq_lens.ctypes.data,
            block_tables=arrays.block_tables.ctypes.data,
            sampled=self._sampled.ctypes.data,
            tokens_stride=tokens.shape[1],
            tables_stride=tables.shape[1],
            block_size=table.block_size,
            num_rows=len(tables),
            num_blocks_in_all=table.num_blocks_in_all,
            most_requests=most,
        )
        self._where = byref(self._args)
        self._step_rows: StepRows | None = None  # of the last step
        self._ones: list[int] = []  # as many as that step had requests
        self._num_ones = most  # lengths, from the first one on, that are 1
        self._point_to(self._few)
        self._decodes: tuple[int, Gathered] | None = None  # the last ones of these members, and their tables' width

    def gather(self, step_rows: StepRows, lengths: Collection[int]) -> Gathered:
        """Gather the arrays of a step that computes so many tokens of each of these requests.

        Returns the same object while the same requests decode and the shapes of their arrays stay. Raises
        ``AssertionError`` for more tokens than a request can have, or has blocks for, and for none.
        """
        args, count, values = self._args, len(lengths), list(lengths)
        # What the last step has left in the arguments is not written again: 32 greedy rows take 618 thousand
        # instructions this way, here and in the drawer, and took 640.
        if step_rows is not self._step_rows or count != len(self._ones):
            self._step_rows, self._ones, self._decodes = step_rows, [1] * count, None
            args.rows, args.num_requests = step_rows.rows_at, count
        if values != self._ones:
            num_tokens = sum(values)
            if num_tokens > len(self._few[0]) or self._in_use is not self._few:
                self._choose_arrays(num_tokens)
            self._num_ones, self._lengths[:count] = 0, values
        else:  # found sooner than the sum, which another step may have too
            num_tokens = count
            if count > self._num_ones or self._in_use is not self._few:
                self._choose_arrays(count)
                self._num_ones, self._lengths[:count] = count, 1
        if (gathered := self._gather(self._where)) != count:
            raise AssertionError(self._wrong(step_rows, gathered))
        if args.num_sampled != num_tokens:
            return self._view(count, num_tokens)
        last = self._decodes
        # The views are kept while the same requests decode: preparing a batch of 32 takes 18 µs this way and took 38.
        if last is None or last[0] != args.width:
            last = self._decodes = args.width, self._view(count, num_tokens)
        return last[1]

    def _wrong(self, step_rows: StepRows, index: int) -> str:
        """Say what is wrong with a request of a step, or (index -1) with the step."""
        if index < 0:
            return f"a step of {self._args.num_requests} requests, of which {self._args.most_requests} fit"
        row = step_rows.rows.item(index)
        _, computed, _, tables, num_blocks = self._inputs
        return (
            f"request {step_rows.req_ids[index]}: {self._lengths[index]} tokens from position {computed[row]} on, with "
            f"{num_blocks[row]} blocks of {self._args.block_size} tokens: {tables[row, : num_blocks[row]].tolist()}; "
            f"a request has at most {self._args.tokens_stride} tokens, the cache {self._args.num_blocks_in_all} blocks"
        )

    def _view(self, count: int, num_tokens: int) -> Gathered:
        arrays, (token_ids, positions, slots) = self.arrays, self._in_use
        return Gathered(
            token_ids[:num_tokens],
            positions[:num_tokens],
            arrays.query_starts[: count + 1],
            arrays.seq_lens[:count],
            arrays.block_tables[:count, : self._args.width],
            slots[:num_tokens],
            self._sampled[: self._args.num_sampled],
        )

    def _choose_arrays(self, num_tokens: int) -> None:
        """Let the arrays of tokens be those that never move, or larger ones if the step needs them."""
        if num_tokens > len(self._many[0]):
            token_ids, positions, slots = np.empty((3, 2 * num_tokens), dtype=np.int64)
            self._many = token_ids, positions, slots
        wanted = self._few if num_tokens <= len(self._few[0]) else self._many
        if wanted is not self._in_use:
            self._point_to(wanted)

    def _point_to(self, arrays: tuple[Ints, Ints, Ints]) -> None:
        self._in_use = arrays
        args, (token_ids, positions, slots) = self._args, arrays
        args.most_tokens = len(token_ids)
        args.token_ids, args.positions, args.slots = (each.ctypes.data for each in (token_ids, positions, slots))


def make_gatherer(tokens: Int32s, computed: Ints, known: Ints, table: BlockTable) -> Gatherer | None:
    """Return the gatherer of a batch; None: numpy gathers."""
    if table.num_groups > 1:
        return None
    try:
        return Gatherer(tokens, computed, known, table)
    except KernelsUnavailable:
        return None


class KernelSampler:
    """Belongs to a batch, whose arrays never move."""

    def __init__(self, tokens: Int32s, known: Ints, prompts: Ints) -> None:
        """The arguments are the batch's token ids, how many of each row are known, and how many are its prompt.

        Raises :class:`KernelsUnavailable`.
        """
        self._append = load_draw().append_drawn
        self._drawn = np.empty(len(tokens), dtype=np.int64)
        self._arrays = (tokens, known, prompts)  # kept: the kernel uses them
        self._args = DrawArgs(
            *(each.ctypes.data for each in self._arrays),
            drawn=self._drawn.ctypes.data,
            tokens_stride=tokens.shape[1],
            num_rows=len(tokens),
            most_drawn=len(tokens),
        )
        self._where = byref(self._args)
        # The arrays of the last call, to which the arguments point: without a reference their memory would be freed.
        self._step_rows: StepRows | None = None
        self._places = self._found = self._drawn[:0]
        self._layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def append(self, step_rows: StepRows, places: Ints, logits: Tensor) -> Ints | None:
        """Draw a token for each of the requests ``places`` [n] of a step from logits [n, vocab], as
        :meth:`~..sampler.host.sampler.Sampler.sample` does, and append it to its row; a full row keeps its tokens.

        Returns the tokens [n], which hold until the next call; None: one of the logits is NaN or a largest one is
        infinite, or they are a device's, and nothing was appended. Raises ``AssertionError`` for places or rows that
        are not there.
        """
        # numpy draws such a step. The kernel is for the usual one: 32 greedy rows take 102 µs with it and took 177,
        # because numpy's code is cold after the weights have passed through the caches.
        layout = logits.shape, logits.stride()
        if logits.dtype is not torch.float32 or layout[1][1] != 1 or not logits.is_cpu:
            return None
        # Setting the pointers costs more than the comparison: the same arrays come while the same requests decode.
        if step_rows is not self._step_rows or places is not self._places or layout != self._layout:
            self._point_to(step_rows, places, layout)
        args = self._args
        args.logits, args.num_threads = logits.data_ptr(), kernel_threads()
        appended = self._append(self._where)
        assert appended >= 0, f"tokens for places {places} of {len(step_rows.rows)} requests: one is not there"
        return self._found if appended else None

    def _point_to(self, step_rows: StepRows, places: Ints, layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        """Let the next calls draw for these places of a step, from logits of this shape and these strides."""
        args, ((count, vocab), (stride, _)) = self._args, layout
        assert len(places) == count, f"{len(places)} tokens are to be drawn from {count} rows of logits"
        self._layout = None  # until all of them are written
        args.rows, args.params, args.num_requests = step_rows.rows_at, step_rows.draws_at, len(step_rows.rows)
        args.places, args.num_drawn = places.ctypes.data, count
        args.vocab, args.logits_stride = vocab, stride
        self._step_rows, self._places, self._found, self._layout = step_rows, places, self._drawn[:count], layout


def make_kernel_sampler(tokens: Int32s, known: Ints, prompts: Ints) -> KernelSampler | None:
    """Return what draws the tokens of a batch; None: numpy does."""
    try:
        return KernelSampler(tokens, known, prompts)
    except KernelsUnavailable:
        return None

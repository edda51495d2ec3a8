"""Makes plans over arrays that stay where they are, so that recorded calls can read another step from them."""

from collections.abc import Sequence
from ctypes import Structure

import numpy as np
import torch

from ..attention.attention_backend import AttentionBackend, AttentionPlan, IntArray
from ..attention.cpu_backend import CPUBackend, CPUPlan, PlanArrays
from ..attention.grouped_backend import GroupedBackend
from ..attention.shared_prefix import SharedPrefixes
from ..attention.states import StatePlan
from ..batch.batch_arrays import StepArrays
from ..kernels.library import AttentionArgs


class _FixedArrays:
    """Holds the arrays of one group of layers."""

    def __init__(self, backend: CPUBackend, arrays: StepArrays) -> None:
        self._backend = backend
        most = len(arrays.seq_lens)
        members, starts, lengths = (np.zeros(most + more, dtype=np.int32) for more in (0, 1, 0))
        self._arrays = PlanArrays(
            query_starts=arrays.query_starts,
            seq_lens=arrays.seq_lens,
            block_tables=arrays.block_tables,
            slots=torch.from_numpy(arrays.slots),
            prefixes=SharedPrefixes(members, starts, lengths),
            num_requests=0,
            num_groups=0,
        )
        self._slots = arrays.slots
        self._decoding: IntArray | None = None  # the rows whose shared prefixes are known
        self.tables_at = arrays.block_tables.ctypes.data
        self.num_requests = self.num_groups = 0

    def plan(self) -> CPUPlan:
        self._arrays.num_requests, self._arrays.num_groups = self.num_requests, self.num_groups
        return CPUPlan(self._backend, self._arrays)

    def fill(
        self, query_starts: IntArray, seq_lens: IntArray, tables: IntArray, slots: IntArray, rows: IntArray
    ) -> None:
        arrays, count = self._arrays, len(seq_lens)
        if seq_lens.base is not arrays.seq_lens:  # otherwise the batch gathered the step here
            arrays.query_starts[: count + 1] = query_starts
            arrays.seq_lens[:count] = seq_lens
            arrays.block_tables[:count, : tables.shape[1]] = tables
            self._slots[: len(slots)] = slots
        self.num_requests = count
        if rows is not self._decoding or len(slots) != count:
            self._find_groups(query_starts, seq_lens, tables)
            self._decoding = rows if len(slots) == count else None

    def _find_groups(self, query_starts: IntArray, seq_lens: IntArray, tables: IntArray) -> None:
        self.num_groups = 0
        finder, fixed = self._backend.prefixes, self._arrays.prefixes
        if len(seq_lens) >= finder.fewest_members:
            found = finder.find(np.diff(query_starts), seq_lens.copy(), tables.copy())
            fixed.members[: len(found.members)] = found.members
            fixed.starts[: len(found.starts)] = found.starts
            fixed.lengths[: len(found.lengths)] = found.lengths
            self.num_groups = len(found.lengths)


class FixedPlan:
    """Holds the arrays of every group of layers, for steps up to a size."""

    def __init__(
        self,
        backend: AttentionBackend,
        parts: Sequence[CPUBackend],
        most_tokens: int,
        most_blocks: int,
        gathered: StepArrays | None,
    ) -> None:
        """``parts``: the backends of the groups; ``most_blocks``: of a request, in one group."""
        self.most_tokens = most_tokens
        self._backend = backend
        arrays = [gathered or StepArrays.allocate(most_tokens, most_blocks) for _ in parts]
        self._parts = [_FixedArrays(part, own) for part, own in zip(parts, arrays, strict=True)]
        self.token_ids, self.positions = arrays[0].token_ids, arrays[0].positions
        """Where a recorded step reads its tokens [n] and their positions [n]."""

    def fill(
        self, cu_query_lens: IntArray, seq_lens: IntArray, tables: IntArray, slots: IntArray, rows: IntArray
    ) -> None:
        """Copy the arrays of a step, as :meth:`..attention.attention_backend.AttentionBackend.plan` gets them, but for
        those that lie here. ``rows`` [R] of the batch are the same array while the same requests go on in them."""
        if len(self._parts) == 1:
            self._parts[0].fill(cu_query_lens, seq_lens, tables, slots, rows)
            return
        for index, part in enumerate(self._parts):
            part.fill(cu_query_lens, seq_lens, tables[:, index :: len(self._parts)], slots[index], rows)

    def plan(self) -> AttentionPlan:
        """Return a plan of the step that was filled in last."""
        if isinstance(self._backend, GroupedBackend):
            return self._backend.join([part.plan() for part in self._parts])
        return self._parts[0].plan()

    def bind(self, structs: Sequence[Structure]) -> "BoundPlan":
        """Return what adapts recorded arguments, those of attention among ``structs``."""
        attending = [each for each in structs if isinstance(each, AttentionArgs)]
        return BoundPlan(
            [(part, [each for each in attending if each.block_tables == part.tables_at]) for part in self._parts]
        )


class FixedStates:
    """Holds the slots of a step in which each row computes one token, where recorded steps read them."""

    def __init__(self, most_tokens: int) -> None:
        self._read, self._written = torch.zeros(2, most_tokens, dtype=torch.int32).unbind()
        self._cu_lens = torch.arange(most_tokens + 1, dtype=torch.int32)

    def fill(self, states: StatePlan, *, on_trial: bool = False) -> None:
        """Copy the slots of a step. ``on_trial``: write the slot that no request has, so that the step can be computed
        again."""
        count = len(states.read)
        self._read[:count] = states.read
        self._written[:count] = states.num_slots - 1 if on_trial else states.written

    def plan(self, states: StatePlan) -> StatePlan:
        """Return a plan that reads what was filled in, over the same slots."""
        count = len(states.read)
        return StatePlan(self._read[:count], self._written[:count], self._cu_lens[: count + 1], states.layers)


class BoundPlan:
    """Keeps the arguments of a recording that are numbers of a step: how many requests, and groups of them, it has."""

    def __init__(self, parts: Sequence[tuple[_FixedArrays, list[AttentionArgs]]]) -> None:
        self._parts = parts
        self._adapted = [(-1, -1)] * len(parts)

    def adapt(self) -> None:
        """Take over the numbers of the step that was filled in last."""
        for index, (part, attending) in enumerate(self._parts):
            numbers = (part.num_requests, part.num_groups)
            if self._adapted[index] != numbers:
                self._adapted[index] = numbers
                for args in attending:
                    args.num_requests = part.num_requests
                    args.num_groups = 0 if args.window else part.num_groups


def make_fixed_plan(
    backend: AttentionBackend, most_tokens: int, most_blocks: int, gathered: StepArrays | None = None
) -> FixedPlan | None:
    """Return a plan for steps of so many tokens and blocks of a request; None: the backend's steps are not recorded.

    ``gathered``: where a batch gathers its steps, so that these need no copy; None if there are groups of layers.
    """
    parts = backend.parts if isinstance(backend, GroupedBackend) else [backend]
    if not all(isinstance(part, CPUBackend) for part in parts):
        return None
    found = [part for part in parts if isinstance(part, CPUBackend)]
    return FixedPlan(backend, found, most_tokens, most_blocks, gathered)

"""Makes plans over arrays that stay where they are, so that recorded calls can read another step from them."""

from collections.abc import Sequence
from ctypes import Structure

import numpy as np
import torch

from ..kernels.library import AttentionArgs
from .attention_backend import AttentionBackend, AttentionPlan, IntArray
from .cpu_backend import CPUBackend, CPUPlan
from .grouped_backend import GroupedBackend
from .plan_arrays import PlanArrays
from .shared_prefix import SharedPrefixes


class _FixedArrays:
    """Holds the arrays of one group of layers."""

    def __init__(self, backend: CPUBackend, most_tokens: int, most_blocks: int) -> None:
        self._backend = backend
        members, starts, lengths = (np.zeros(most_tokens + more, dtype=np.int32) for more in (0, 1, 0))
        self._arrays = PlanArrays(
            query_starts=np.zeros(most_tokens + 1, dtype=np.int32),
            seq_lens=np.zeros(most_tokens, dtype=np.int32),
            block_tables=np.zeros((most_tokens, most_blocks), dtype=np.int32),
            slots=torch.zeros(most_tokens, dtype=torch.int64),
            prefixes=SharedPrefixes(members, starts, lengths),
            num_requests=0,
            num_groups=0,
        )
        self._slots = self._arrays.slots.numpy()
        self.tables_at = self._arrays.block_tables.ctypes.data
        self.num_requests = self.num_groups = 0

    def plan(self) -> CPUPlan:
        self._arrays.num_requests, self._arrays.num_groups = self.num_requests, self.num_groups
        return CPUPlan(self._backend, self._arrays)

    def fill(self, query_starts: IntArray, seq_lens: IntArray, tables: IntArray, slots: IntArray) -> None:
        arrays, count = self._arrays, len(seq_lens)
        arrays.query_starts[: count + 1] = query_starts
        arrays.seq_lens[:count] = seq_lens
        arrays.block_tables[:count, : tables.shape[1]] = tables
        self._slots[: len(slots)] = slots
        self.num_requests, self.num_groups = count, 0
        finder = self._backend.prefixes
        if count >= finder.fewest_members:
            self._share(finder.find(np.diff(query_starts), seq_lens.copy(), tables.copy()))

    def _share(self, prefixes: SharedPrefixes) -> None:
        fixed = self._arrays.prefixes
        fixed.members[: len(prefixes.members)] = prefixes.members
        fixed.starts[: len(prefixes.starts)] = prefixes.starts
        fixed.lengths[: len(prefixes.lengths)] = prefixes.lengths
        self.num_groups = len(prefixes.lengths)


class FixedPlan:
    """Holds the arrays of every group of layers, for steps up to a size."""

    def __init__(self, backend: AttentionBackend, parts: Sequence[CPUBackend], most_tokens: int, most_blocks: int):
        """``parts``: the backends of the groups; ``most_blocks``: of a request, in one group."""
        self.most_tokens = most_tokens
        self._backend = backend
        self._parts = [_FixedArrays(part, most_tokens, most_blocks) for part in parts]

    def fill(self, cu_query_lens: IntArray, seq_lens: IntArray, tables: IntArray, slots: IntArray) -> None:
        """Copy the arrays of a step, as :meth:`.attention_backend.AttentionBackend.plan` gets them."""
        if len(self._parts) == 1:
            self._parts[0].fill(cu_query_lens, seq_lens, tables, slots)
            return
        for index, part in enumerate(self._parts):
            part.fill(cu_query_lens, seq_lens, tables[:, index :: len(self._parts)], slots[index])

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


def make_fixed_plan(backend: AttentionBackend, most_tokens: int, most_blocks: int) -> FixedPlan | None:
    """Return a plan for steps of so many tokens and blocks of a request; None: the backend's steps are not recorded."""
    parts = backend.parts if isinstance(backend, GroupedBackend) else [backend]
    if not all(isinstance(part, CPUBackend) for part in parts):
        return None
    return FixedPlan(backend, [part for part in parts if isinstance(part, CPUBackend)], most_tokens, most_blocks)

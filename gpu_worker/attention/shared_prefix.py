"""Finds the requests of a step that begin with the same blocks, so that attention reads those blocks once for all."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from .attention_backend import IntArray

_FEWEST_TOKENS = 128
"""Below this length merging costs about as much as sharing saves."""

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class SharedPrefixes:
    """Lists groups of decoding requests. A request is in at most one group."""

    members: Int32s
    """The requests, group after group."""
    starts: Int32s
    """[groups + 1]: the index in ``members`` at which each group begins."""
    lengths: Int32s
    """[groups]: how many tokens its members share. They fill whole blocks and are fewer than any member has."""

    @classmethod
    def of(cls, groups: "list[_Group]") -> Self:
        members = [request for group in groups for request in group.members]
        starts = np.cumsum([0] + [len(group.members) for group in groups])
        return cls(*(np.array(x, dtype=np.int32) for x in (members, starts, [group.length for group in groups])))


_NONE = SharedPrefixes.of([])


@dataclass(frozen=True)
class _Group:
    members: list[int]
    length: int

    @property
    def saved(self) -> int:
        return (len(self.members) - 1) * self.length


class SharedPrefixFinder:
    """Finds the groups of each step, and reuses them while the same requests continue to decode."""

    def __init__(self, block_size: int, fewest_members: int) -> None:
        """``fewest_members``: how many requests a group needs, two or more."""
        self.fewest_members = fewest_members
        self._block_size = block_size
        # the lengths and tables that the groups were found for
        self._found: tuple[IntArray, IntArray, SharedPrefixes] | None = None

    def find(self, query_lens: IntArray, seq_lens: IntArray, block_tables: IntArray) -> SharedPrefixes:
        """Return the groups of a step. The arguments are those of a plan, and must not change afterwards."""
        if len(seq_lens) < self.fewest_members:
            return _NONE
        if not (query_lens == 1).all():
            self._found = None
            return self._search(query_lens, seq_lens, block_tables)
        # A row's blocks only grow while it decodes, so the groups of the last step hold; every step once compared all
        # tables block by block.
        if self._found is None or not _goes_on(*self._found[:2], seq_lens, block_tables):
            prefixes = self._search(query_lens, seq_lens, block_tables)
            self._found = (seq_lens, block_tables, prefixes)
        return self._found[2]

    def _search(self, query_lens: IntArray, seq_lens: IntArray, block_tables: IntArray) -> SharedPrefixes:
        return find_shared_prefixes(query_lens, seq_lens, block_tables, self._block_size, self.fewest_members)


def _goes_on(old_lens: IntArray, old_tables: IntArray, seq_lens: IntArray, tables: IntArray) -> bool:
    """Return whether no request became shorter or changed earlier blocks, so that the shared prefixes still hold."""
    width = old_tables.shape[1]
    return (
        len(seq_lens) == len(old_lens)
        and tables.shape[1] >= width
        and bool((seq_lens >= old_lens).all())
        and np.array_equal(tables[:, :width], old_tables)
    )


def find_shared_prefixes(
    query_lens: IntArray, seq_lens: IntArray, block_tables: IntArray, block_size: int, fewest_members: int
) -> SharedPrefixes:
    """Find the groups of at least ``fewest_members``, two or more, among requests with one query each.

    The other arguments are those of a plan.
    """
    if len(seq_lens) < fewest_members:
        return SharedPrefixes.of([])
    decodes = np.flatnonzero(query_lens == 1)
    full_blocks = (seq_lens - 1) // block_size  # the query's own block is still being filled
    groups = _split(decodes.tolist(), 0, full_blocks, block_tables, fewest_members)
    return SharedPrefixes.of(
        [
            _Group(group.members, group.length * block_size)
            for group in groups
            if group.length * block_size >= _FEWEST_TOKENS
        ]
    )


def _split(requests: list[int], depth: int, full_blocks: IntArray, tables: IntArray, fewest: int) -> list[_Group]:
    """Split requests that agree before column ``depth`` into groups that agree for longer; lengths are in blocks."""
    if len(requests) < fewest:
        return []
    by_block: dict[int, list[int]] = defaultdict(list)
    longer = [request for request in requests if full_blocks[request] > depth]
    for request, block in zip(longer, tables[longer, depth].tolist() if longer else (), strict=True):
        by_block[block].append(request)
    found = []
    for members in by_block.values():
        if len(members) >= fewest:
            rows = tables[members, : int(full_blocks[members].min())]
            differing = np.flatnonzero((rows != rows[0]).any(axis=0))
            whole = _Group(members, int(differing[0]) if len(differing) else rows.shape[1])
            parts = _split(members, whole.length, full_blocks, tables, fewest)
            found += parts if sum(part.saved for part in parts) > whole.saved else [whole]
    return found

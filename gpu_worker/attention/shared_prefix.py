"""Finds the requests of a step that begin with the same blocks, so that attention reads those blocks once for all, and
lists for the programs of a GPU which keys each of them reads."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from .attention_backend import AttentionPlan, DeviceBackend, IntArray, PlanTensors

_FEWEST_TOKENS = 128
"""Below this length merging costs a CPU about as much as sharing saves."""

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
        limits = (self._block_size, self.fewest_members, _FEWEST_TOKENS)
        return find_shared_prefixes(query_lens, seq_lens, block_tables, *limits)


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
    query_lens: IntArray,
    seq_lens: IntArray,
    block_tables: IntArray,
    block_size: int,
    fewest_members: int,
    fewest_tokens: int,
) -> SharedPrefixes:
    """Find the groups of at least ``fewest_members``, two or more, among requests with one query each, that share at
    least ``fewest_tokens``.

    The other arguments are those of a plan.
    """
    if len(seq_lens) < fewest_members:
        return SharedPrefixes.of([])
    full_blocks = (seq_lens - 1) // block_size  # the query's own block is still being filled
    groups = _groups(np.flatnonzero((query_lens == 1) & (full_blocks > 0)), full_blocks, block_tables, fewest_members)
    return SharedPrefixes.of(
        [
            _Group(group.members, group.length * block_size)
            for group in groups
            if group.length * block_size >= fewest_tokens
        ]
    )


def _groups(requests: IntArray, full_blocks: IntArray, tables: IntArray, fewest: int) -> list[_Group]:
    """Return the groups, with lengths in blocks, that save most among requests of at least one full block."""
    _, kinds, counts = np.unique(tables[requests, 0], return_inverse=True, return_counts=True)
    requests = requests[counts[kinds] >= fewest]
    if not len(requests):
        return []
    # In the order of their tables whatever begins alike is adjacent. Splitting groups block by block took 50 ms of a
    # step where each of 256 requests had a block more in common with the next, and too many calls of 1,024.
    width = int(np.partition(full_blocks[requests], -fewest)[-fewest])  # no group has more in common
    own_blocks = np.minimum(full_blocks[requests], width)
    depth = _common_blocks(tables, requests, int(own_blocks.min()))
    rows = np.repeat(-1 - requests.astype(tables.dtype)[:, None], width - depth + 1, axis=1)  # unlike any other's
    np.copyto(rows[:, :-1], tables[requests, depth:width], where=np.arange(depth, width) < own_blocks[:, None])
    order = sorted(range(len(rows)), key=[row.tobytes() for row in rows].__getitem__)
    rows = rows[order]
    alike = (rows[1:] != rows[:-1]).argmax(axis=1) + depth  # blocks that each has in common with the next
    ranges = _best(alike.tolist(), fewest)
    groups = [_Group(sorted(requests[order[begin:end]].tolist()), length) for begin, end, length in ranges]
    return sorted(groups, key=lambda group: group.members[0])


def _common_blocks(tables: IntArray, requests: IntArray, most: int) -> int:
    """Return how many blocks all of these have in common, or a few less: most are read once, where all share them."""
    depth = 0
    while depth < most:
        end = min(most, 2 * depth + 32)
        if (tables[requests, depth:end] != tables[requests[0], depth:end]).any():
            break
        depth = end
    return depth


@dataclass(slots=True)
class _Node:
    """Holds neighbours that have ``length`` blocks in common, from ``begin`` on, and the ranges of them that save most:
    begin, end, and length."""

    length: int
    begin: int
    saved: int = 0
    ranges: list[tuple[int, int, int]] = field(default_factory=list)


def _best(alike: list[int], fewest: int) -> list[tuple[int, int, int]]:
    """Return the ranges of at least ``fewest`` neighbours that save most. ``alike``: how many blocks each has in common
    with the next."""
    nodes = [_Node(0, 0)]  # each lies in the one before
    for place, length in enumerate([*alike, 0]):
        begin = place
        inner: _Node | None = None
        while nodes[-1].length > length:
            node = nodes.pop()
            end = place + 1
            saved = (end - node.begin - 1) * node.length
            if end - node.begin >= fewest and saved >= node.saved:
                node.saved, node.ranges = saved, [(node.begin, end, node.length)]
            begin, inner = node.begin, node
            if nodes[-1].length > length:
                _add(nodes[-1], inner)
                inner = None
        if nodes[-1].length < length:
            nodes.append(_Node(length, begin))
        if inner is not None:
            _add(nodes[-1], inner)
    return nodes[0].ranges


def _add(node: _Node, inner: _Node) -> None:
    node.saved += inner.saved
    node.ranges += inner.ranges


class SharedRoom(NamedTuple):
    """Says how many entries, of four numbers each, stand in a GPU's list before those of the requests' own keys."""

    programs: int
    """Of :func:`..kernels.triton.paged_attention.attend_shared`."""
    members: int
    """The requests of these programs, four to an entry."""
    requests: int
    """What each request of the step shares."""

    @classmethod
    def of(cls, requests: int, queries: int, most_parts: int, fewest_members: int) -> Self:
        """Return the room for any step of so many requests. ``queries``: of a program; ``most_parts``: how many parts
        of keys there are at most beyond one for each set of queries."""
        # The last program of each group may lack all queries but one.
        sets = (requests + requests // fewest_members * (queries - 1)) // queries
        return cls(sets + most_parts, -(-sets * queries // 4), requests)


def shared_entries(
    prefixes: SharedPrefixes, queries: int, split: Callable[[IntArray], IntArray], room: SharedRoom
) -> Int32s:
    """Return what the programs of a GPU that read the keys of these groups do, [entries of ``room``, 4].

    ``queries``: of a program. ``split``: into how many parts keys of such lengths are split.
    """
    sizes = np.diff(prefixes.starts)
    sets = -(-sizes // queries)  # of queries that a program has, in each group
    first_sets = np.repeat(np.cumsum(sets) - sets, sizes)
    places = np.arange(len(prefixes.members)) - np.repeat(prefixes.starts[:-1], sizes) + first_sets * queries
    lengths = np.repeat(prefixes.lengths, sets)
    parts = split(lengths)
    first_programs = np.cumsum(parts) - parts
    set_of = np.repeat(np.arange(len(parts)), parts)
    count = len(set_of)
    programs = np.full((room.programs, 4), -1, dtype=np.int32)
    programs[:count, 0], programs[:count, 1] = set_of * queries, lengths[set_of]
    programs[:count, 2], programs[:count, 3] = np.arange(count) - first_programs[set_of], parts[set_of]
    members = np.full(4 * room.members, -1, dtype=np.int32)
    members[places] = prefixes.members
    shares = np.zeros((room.requests, 4), dtype=np.int32)
    set_of_member = places // queries
    columns = (lengths[set_of_member], first_programs[set_of_member], parts[set_of_member], places % queries)
    shares[prefixes.members] = np.stack(columns, axis=1)
    return np.concatenate((programs, members.reshape(-1, 4), shares))


@runtime_checkable
class SharingBackend(DeviceBackend, Protocol):
    """Also makes plans in which requests that decode read the keys together that they share, in layers that see all
    tokens."""

    def find_shared(self, seq_lens: IntArray, block_tables: IntArray) -> SharedPrefixes | None:
        """Return what requests that each decode a token share, if reading it together pays; None: it does not."""

    def shared_room(self, requests: int) -> SharedRoom | None:
        """Return the room in the list of a step of so many requests; None: too few to share anything."""

    def shared_work(self, prefixes: SharedPrefixes, seq_lens: IntArray, room: SharedRoom) -> Int32s:
        """Return the list of a step: what ``room`` names, and then the entries of the requests' own keys, as many as
        :meth:`DeviceBackend.room` says at most."""

    def shared_plan_of(self, tensors: PlanTensors, room: SharedRoom) -> AttentionPlan:
        """Return a plan of arrays that are on the device, as :meth:`DeviceBackend.plan_of` does, with such a list."""

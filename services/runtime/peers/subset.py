"""Chooses which members of a mesh each process works with, when all-to-all would be too many connections. No I/O.

Processes of one kind (the *owners*: output processors, or gateways) choose among the members of another kind (engines,
or output processors and tokenizers). Both are put in the order of the digests of their names, as in rendezvous hashing,
so that every process computes the same subsets without asking. Owner ``i`` of ``n`` takes a run of that ring: as much
as ``c`` of ``n`` equal shares, from share ``i`` on. That is the deterministic aperture of Twitter's Finagle with whole
shares; "Reinventing Backend Subsetting at Google" (ACM Queue 20(5), 2022) compares such rings with random choices,
which leave one of 25 members in no subset at all where each should be in three.

What follows, and the tests prove:

- Each member is in exactly ``c`` subsets, and the sizes of subsets differ by at most one.
- When a member comes or goes, a subset gains at most two members and loses at most two; when an owner comes or goes, so
  do the owners of each member. Only where ``c`` itself changes, each member gains or loses as many owners more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

_LEAST_COPIES = 2
"""Each member is in at least two subsets, so that one owner's loss leaves no member without work."""


@dataclass(frozen=True, slots=True)
class ReplicaPosition:
    """Says which of the owners of its kind a process is: number ``index``, below ``count``, in the order of names."""

    index: int
    count: int


def in_order(names: Iterable[str]) -> list[str]:
    """Return different names in the order of their digests, in which no neighbourhood of names stays together."""
    return sorted(names, key=_key)


def positions(names: Iterable[str]) -> dict[str, ReplicaPosition]:
    """Return the position of each of these owners, by name."""
    ordered = in_order(set(names))
    return {name: ReplicaPosition(index, len(ordered)) for index, name in enumerate(ordered)}


def num_copies(num_members: int, num_owners: int, size: int) -> int:
    """Return in how many subsets each member is: as many as make subsets of at most ``size`` members, but at least two.
    All members are in all subsets if there are at most ``size`` of them, or one or two owners."""
    copies = size * num_owners // num_members if num_members else num_owners
    return min(max(copies, _LEAST_COPIES), num_owners)


def indices(num_members: int, position: ReplicaPosition, size: int) -> list[int]:
    """Return which members of the ring are in the subset of the owner at ``position``, in the ring's order."""
    index, count = position.index, position.count
    # All-to-all, a hundred output processors and a thousand engines have 100,000 streams, each with less than one of an
    # engine's 64 answers in a frame. Simulated: 2,999 links with 21 rows a frame instead of 27,028 with 1.3.
    copies = num_copies(num_members, count, size)
    if copies == count:
        return list(range(num_members))
    # Both ends are rounded down in the same way, so neighbouring shares meet without a gap and the sizes differ by one.
    # With random or plain rendezvous subsets some engines are in none, and others in three times the mean.
    begin, end = index * num_members // count, (index + copies) * num_members // count
    return [number % num_members for number in range(begin, end)]


def choose(members: Iterable[str], position: ReplicaPosition | None, size: int) -> list[str]:
    """Return the members in the subset of the owner at ``position``; all of them while the position is not known."""
    ordered: Sequence[str] = in_order(set(members))
    return list(ordered) if position is None else [ordered[each] for each in indices(len(ordered), position, size)]


def rings(members: Sequence[tuple[str, object]]) -> list[list[int]]:
    """Return the numbers of the members of each group, in the order of their names. A subset has a run of each ring.

    ``members``: the name and group of each; groups do different work, and an owner needs members of all.
    """
    by_group: dict[object, list[int]] = {}
    for number in sorted(range(len(members)), key=lambda number: _key(members[number][0])):
        by_group.setdefault(members[number][1], []).append(number)
    return list(by_group.values())


def of_rings(members: Iterable[Sequence[int]], position: ReplicaPosition, size: int) -> list[int]:
    """Return the numbers of the members in a subset that takes ``size`` of each of these rings, the lowest first."""
    return sorted(ring[each] for ring in members for each in indices(len(ring), position, size))


def _key(name: str) -> tuple[bytes, str]:
    return blake2b(name.encode(), digest_size=8).digest(), name

"""Decides which expert each place of a layer holds, from the load of the experts. No I/O.

An expert of the model is logical; each place for one on a rank is a physical expert, and the places of a rank follow
each other. The busiest logical experts get the spare places, then the copies are spread over the ranks, heaviest first
(the idea of DeepSeek's EPLB: https://github.com/deepseek-ai/EPLB). All ranks compute the same plan from the same loads,
in integers, because sums of floats may differ between processors.
"""

import heapq
from collections import Counter

import numpy as np
import numpy.typing as npt
import torch

from .grouped_rows import GroupedRows

Ints = npt.NDArray[np.int64]

_MIN_GAIN = 50
"""A plan counts if the busiest rank of a layer loses more than one part in so many of its load: moves are not free."""
_UNIT = 1 << 20
"""A load of one token, so that the share of a copy is an integer."""


def first_placement(num_experts: int, num_places: int) -> Ints:
    """Return the logical expert of each place [num_places] before any load is known: each once, in order, and then the
    first ones again."""
    return np.arange(num_places) % num_experts


def rank_loads(loads: Ints, placement: Ints, num_ranks: int) -> Ints:
    """Return the load of each rank [num_ranks], in parts of a token, if the copies of an expert share its load equally.

    Args:
        loads: [num_experts] tokens of each logical expert.
        placement: [num_places] the logical expert of each place.
        num_ranks: Ranks, which have equally many places.
    """
    shares = loads * _UNIT // np.maximum(1, np.bincount(placement, minlength=len(loads)))
    by_rank: Ints = shares[placement].reshape(num_ranks, -1).sum(1)
    return by_rank


def plan_placement(loads: Ints, current: Ints, num_ranks: int) -> Ints:
    """Return the logical expert of each place [num_places] from now on: ``current``, or a placement with which the
    busiest rank has less to compute.

    Args:
        loads: [num_experts] tokens of each logical expert.
        current: [num_places] the logical expert of each place.
        num_ranks: Ranks, which have equally many places.
    """
    num_copies = _num_copies(loads, len(current), num_ranks)
    placed = _keep_in_place(_spread(loads, num_copies, num_ranks), current.reshape(num_ranks, -1))
    before, after = (int(rank_loads(loads, each, num_ranks).max()) for each in (current, placed))
    return placed if before - after > before // _MIN_GAIN else current


def _num_copies(loads: Ints, num_places: int, num_ranks: int) -> list[int]:
    """Return how many places each logical expert gets: a spare place goes to the expert whose copies have most to
    compute, unless it has one on every rank."""
    copies = [1] * len(loads)
    heap = [(-load * _UNIT, expert) for expert, load in enumerate(loads.tolist())]
    heapq.heapify(heap)
    for _ in range(num_places - len(loads)):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < num_ranks:
            heapq.heappush(heap, (-int(loads[expert]) * _UNIT // copies[expert], expert))
    return copies


def _spread(loads: Ints, num_copies: list[int], num_ranks: int) -> list[list[int]]:
    """Return the logical experts of each rank: the heaviest copy goes to the rank with the least load that has a place
    left and, where possible, no other copy of the expert."""
    shares = [load * _UNIT // copies for load, copies in zip(loads.tolist(), num_copies, strict=True)]
    per_rank = sum(num_copies) // num_ranks
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    for expert in sorted(range(len(shares)), key=lambda expert: (-shares[expert], expert)):
        for _ in range(num_copies[expert]):
            free = [rank for rank in range(num_ranks) if len(ranks[rank]) < per_rank]
            rank = min(free, key=lambda rank: (expert in ranks[rank], sums[rank], rank))
            ranks[rank].append(expert)
            sums[rank] += shares[expert]
    return ranks


def _keep_in_place(planned: list[list[int]], current: Ints) -> Ints:
    """Number the planned ranks, and order their experts, so that many stay where they are.

    Args:
        planned: For each rank its logical experts, in any order.
        current: [num_ranks, places of a rank].
    """
    held = [Counter(each) for each in current.tolist()]
    wanted = [Counter(each) for each in planned]
    overlaps = sorted(
        (-(have & want).total(), rank, number) for rank, have in enumerate(held) for number, want in enumerate(wanted)
    )
    taken: set[int] = set()
    placed = np.full_like(current, -1)
    for _, rank, number in overlaps:
        if number not in taken and placed[rank, 0] < 0:
            taken.add(number)
            placed[rank] = _keep_order(planned[number], current[rank].tolist())
    return placed.reshape(-1)


def _keep_order(planned: list[int], current: list[int]) -> list[int]:
    """Return ``planned`` in an order in which each expert that the rank has keeps its place."""
    left = Counter(planned)
    placed = [-1] * len(current)
    for place, expert in enumerate(current):
        if left[expert]:
            left[expert] -= 1
            placed[place] = expert
    others = iter(sorted(left.elements()))
    return [next(others) if expert < 0 else expert for expert in placed]


class LayerPlacement:
    """Holds which logical expert each place of a layer has, on all ranks. It outlives the weights: a model that is
    loaded again is placed in the same way.

    Attributes:
        logical: [num_places] the expert of each place.
    """

    def __init__(self, num_experts: int, num_places: int, source: int) -> None:
        """``source``: a number with which ranks that have rows of their own begin with different copies; 0 where all
        ranks have the same rows, and must choose the same copies."""
        self._num_experts = num_experts
        self._source = source
        self.change(first_placement(num_experts, num_places))

    def change(self, logical: Ints) -> None:
        """Use another placement from the next step on."""
        self.logical = logical
        places: list[list[int]] = [[] for _ in range(self._num_experts)]
        for place, expert in enumerate(logical.tolist()):
            places[expert].append(place)
        num_copies = [len(each) for each in places]
        self._num_copies = torch.tensor(num_copies)
        self._places = torch.tensor([each + [0] * (max(num_copies) - len(each)) for each in places])

    def spread(self, grouped: GroupedRows) -> GroupedRows:
        """Return rows that are grouped by logical expert grouped by place.

        The copies of an expert take its rows in turn, so that their numbers of rows differ by at most one.
        """
        if not grouped.experts:
            return grouped
        experts, counts = torch.tensor(grouped.experts), torch.tensor(grouped.counts)
        turns = torch.arange(len(grouped.order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        of_row = experts.repeat_interleave(counts)
        # In turn: tensor parallel workers see the same rows and have to choose alike without exchanging a number. A
        # hash of the row would depend on its last bits, which may differ between processors.
        chosen = self._places[of_row, (turns + of_row + self._source) % self._num_copies[of_row]]
        by_place, order = chosen.sort(stable=True)
        places, sizes = torch.unique_consecutive(by_place, return_counts=True)
        return GroupedRows(grouped.order[order.to(grouped.order.device)], places.tolist(), sizes.tolist())

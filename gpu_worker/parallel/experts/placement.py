"""Maps the experts that a router chooses to the places that hold them."""

import torch

from .grouped_rows import GroupedRows
from .planner import Ints, first_placement


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

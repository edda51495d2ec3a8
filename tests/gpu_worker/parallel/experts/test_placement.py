"""Rows reach a place that holds their expert; the copies of an expert share its rows evenly."""

from collections import Counter

import numpy as np
import torch

from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows
from tokenloom.gpu_worker.parallel.experts.planner import LayerPlacement

LOGICAL = np.array([3, 1, 0, 1, 2, 1])


def place(source: int = 0) -> LayerPlacement:
    placement = LayerPlacement(4, 6, source)
    assert placement.logical.tolist() == [0, 1, 2, 3, 0, 1]
    placement.change(LOGICAL)
    return placement


def test_each_row_goes_to_a_place_of_its_expert_and_copies_take_turns() -> None:
    chosen = torch.randint(4, (50, 2), generator=torch.Generator().manual_seed(1))
    grouped = place().spread(GroupedRows.sort(chosen))
    assert grouped.experts == sorted(set(grouped.experts))
    places = torch.tensor(grouped.experts).repeat_interleave(torch.tensor(grouped.counts))
    assert torch.equal(torch.from_numpy(LOGICAL)[places], chosen.flatten()[grouped.order])
    assert sorted(grouped.order.tolist()) == list(range(100))
    rows = dict(zip(grouped.experts, grouped.counts, strict=True))
    assert max(rows[1], rows[3], rows[5]) - min(rows[1], rows[3], rows[5]) <= 1


def test_single_rows_of_several_ranks_go_to_different_copies() -> None:
    used = Counter(place(source).spread(GroupedRows.sort(torch.tensor([[1]]))).experts[0] for source in range(3))
    assert used == {1: 1, 3: 1, 5: 1}


def test_a_rank_without_rows_has_none_to_spread() -> None:
    assert place().spread(GroupedRows.sort(torch.empty(0, 2, dtype=torch.int64))).experts == []

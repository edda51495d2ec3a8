"""Every plan keeps all experts and fills the ranks equally, and never loads the busiest rank more than before."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenloom.gpu_worker.parallel.experts.grouped_rows import GroupedRows
from tokenloom.gpu_worker.parallel.experts.planner import (
    Ints,
    LayerPlacement,
    first_placement,
    plan_placement,
    rank_loads,
)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Ints, Ints, int]:
    """Draw loads, a placement that an earlier plan made, and the number of ranks."""
    num_ranks, per_rank = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    num_places = num_ranks * per_rank
    num_experts = draw(st.integers(per_rank, num_places))
    load = st.lists(st.integers(0, 1_000_000_000), min_size=num_experts, max_size=num_experts)
    earlier, loads = np.array(draw(load)), np.array(draw(load))
    return loads, plan_placement(earlier, first_placement(num_experts, num_places), num_ranks), num_ranks


@settings(max_examples=200, deadline=None)
@given(layers())
def test_plans(layer: tuple[Ints, Ints, int]) -> None:
    loads, current, num_ranks = layer
    planned = plan_placement(loads, current, num_ranks)
    assert planned.shape == current.shape
    copies = np.bincount(planned, minlength=len(loads))
    assert len(copies) == len(loads)
    assert copies.min() >= 1
    before, after = (rank_loads(loads, each, num_ranks).max() for each in (current, planned))
    assert after <= before
    assert np.array_equal(planned, plan_placement(loads.copy(), current.copy(), num_ranks))
    assert np.array_equal(planned, plan_placement(loads, planned, num_ranks)), "a plan is not planned again"


def test_a_busy_expert_gets_copies_on_other_ranks() -> None:
    loads, current = np.array([900, 20, 30, 10, 20, 20]), first_placement(6, 9)
    planned = plan_placement(loads, current, 3)
    assert np.bincount(planned)[0] == 3
    assert all(0 in rank for rank in planned.reshape(3, 3))
    assert rank_loads(loads, planned, 3).max() < 0.75 * rank_loads(loads, current, 3).max()


def test_without_spare_places_busy_experts_are_separated() -> None:
    planned = plan_placement(np.array([50, 40, 1, 2]), first_placement(4, 4), 2).reshape(2, 2)
    assert sorted(map(sorted, planned.tolist())) == [[0, 2], [1, 3]]


def test_experts_that_may_stay_do() -> None:
    planned = plan_placement(np.array([50, 40, 1, 2]), first_placement(4, 4), 2)
    assert (planned == first_placement(4, 4)).sum() == 2, "two of four experts change their rank"


@pytest.mark.parametrize("loads", [[0, 0, 0, 0], [10, 10, 10, 10], [101, 100, 100, 100]])
def test_nothing_moves_for_nothing(loads: list[int]) -> None:
    assert plan_placement(np.array(loads), first_placement(4, 4), 2).tolist() == [0, 1, 2, 3]


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

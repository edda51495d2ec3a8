"""Arrays that stay where they are hold every step, and shared prefixes are looked for when requests change."""

import shutil

import numpy as np
import pytest
import torch

from tests.gpu_worker.attention.steps import shape
from tokenloom.gpu_worker.attention.cpu_backend import CPUBackend
from tokenloom.gpu_worker.batch.batch_arrays import StepArrays
from tokenloom.gpu_worker.cpu_graphs.fixed_plan import FixedPlan, make_fixed_plan

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")

BLOCK = 16
SHARED = [[*range(8), 10], [*range(8), 20]]
APART = [[*range(8), 10], [*range(30, 38), 20]]


class Plan:
    """Counts the groups of each step."""

    def __init__(self, gathered: StepArrays | None = None) -> None:
        backend = CPUBackend(shape(2), BLOCK, torch.device("cpu"))
        backend.prefixes.fewest_members = 2
        plan = make_fixed_plan(backend, 8, 16, gathered)
        assert plan is not None
        self.plan: FixedPlan = plan

    def count_groups(self, rows: np.ndarray, tables: list[list[int]], query_lens: tuple[int, int] = (1, 1)) -> int:
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        lengths = np.array([130, 131], dtype=np.int32)
        slots = np.arange(sum(query_lens))
        self.plan.fill(starts, lengths, np.array(tables, dtype=np.int32), slots, rows)
        return self.plan._parts[0].num_groups


def test_groups_stay_while_the_same_rows_decode() -> None:
    plan, rows = Plan(), np.arange(2)
    assert plan.count_groups(rows, SHARED) == 1
    assert plan.count_groups(rows, SHARED) == 1
    assert plan.count_groups(rows.copy(), APART) == 0
    assert plan.count_groups(rows, SHARED) == 1, "other requests had the rows meanwhile"


def test_groups_are_looked_for_around_steps_with_drafts() -> None:
    plan, rows = Plan(), np.arange(2)
    assert plan.count_groups(rows, SHARED) == 1
    assert plan.count_groups(rows, SHARED, (2, 1)) == 0
    assert plan.count_groups(rows, SHARED) == 1


def test_what_a_batch_gathered_here_is_not_copied() -> None:
    arrays = StepArrays.allocate(8, 16)
    plan = Plan(arrays).plan
    assert plan.token_ids is arrays.token_ids
    assert plan.positions is arrays.positions
    arrays.seq_lens[:2], arrays.query_starts[:3], arrays.block_tables[:2, :9] = [130, 131], range(3), SHARED
    plan.fill(arrays.query_starts[:3], arrays.seq_lens[:2], arrays.block_tables[:2, :9], arrays.slots[:2], np.arange(2))
    assert plan._parts[0].num_groups == 1
    other = np.array([7, 9], dtype=np.int32)
    plan.fill(np.arange(3), other, np.ones((2, 3), dtype=np.int32), np.array([5, 6]), np.arange(2))
    assert arrays.seq_lens[:2].tolist() == [7, 9]
    assert arrays.slots[:2].tolist() == [5, 6]
    assert arrays.block_tables[1, :4].tolist() == [1, 1, 1, 3]

"""The plan of faults."""

import itertools
import random
from collections import Counter

from benchmarks.chaos.faults.fault import SPLIT, WHOLE, Action
from benchmarks.chaos.faults.plan import in_order, make_plan, take_possible

CUTS = (Action.CUT, Action.RESET, Action.DELAY)


def test_the_plan_is_a_function_of_the_seed() -> None:
    def plan(seed: int) -> object:
        return make_plan(random.Random(seed), [(kind, range(10)) for kind in WHOLE], (Action.KILL,), 0.0)

    assert plan(3) == plan(3)
    assert plan(3) != plan(4)


def test_every_kind_and_every_action_has_its_share() -> None:
    plan = make_plan(random.Random(0), [(kind, range(6)) for kind in SPLIT], CUTS, 10.0)
    found = Counter((fault.kind.name, fault.action) for fault in plan)
    assert found == {(kind.name, action): 2 for kind in SPLIT for action in CUTS}
    assert {fault.seconds for fault in plan if fault.action is Action.RESET} == {0.0}
    assert {fault.seconds for fault in plan if fault.action is not Action.RESET} == {10.0}


def test_the_numbers_of_the_faults_select_their_actions() -> None:
    first, second = (
        make_plan(random.Random(0), [(WHOLE[0], numbers)], CUTS, 10.0) for numbers in (range(2), range(2, 3))
    )
    assert {fault.action for fault in first} == {Action.CUT, Action.RESET}
    assert [fault.action for fault in second] == [Action.DELAY]


def test_a_kind_is_not_met_twice_in_a_row() -> None:
    for seed in range(20):
        plan = make_plan(random.Random(seed), [(kind, range(10)) for kind in WHOLE], (Action.KILL,), 0.0)
        pairs = itertools.pairwise(plan[:-3])  # at the end one kind alone may be left
        assert all(one.kind != other.kind for one, other in pairs)


def test_in_order_meets_each_part_once_a_round() -> None:
    kinds = WHOLE[:2]
    plan = in_order(kinds, [3, 2], Action.TERM, 2)
    members = {kinds[0].name: 3, kinds[1].name: 2}
    found = [(fault.kind.name, int(fault.choice * members[fault.kind.name])) for fault in plan]
    one_round = [*((kinds[0].name, i) for i in range(3)), *((kinds[1].name, i) for i in range(2))]
    assert found == 2 * one_round


def test_the_first_possible_fault_comes_next() -> None:
    plan = in_order(WHOLE[:3], [1, 1, 1], Action.KILL, 1)
    assert take_possible(plan, [False, False, False]) is None
    fault = take_possible(plan, [False, True, True])
    assert fault is not None
    assert fault.kind == WHOLE[1]
    assert [each.kind for each in plan] == [WHOLE[0], WHOLE[2]]

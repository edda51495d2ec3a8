"""What the planner decides, look by look."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tokenloom.planner.demand import EngineLoad, Goals, PlannedRole
from tokenloom.planner.planner import FLIP_SECONDS, KEEP_SECONDS, REMOVE_SECONDS, Limits, Peak, Plan, Planner

LOOK = 10.0


def prefill(number: int, *, tokens: float = 0.0, waiting_tokens: int = 0) -> EngineLoad:
    """An engine that prefills 1,000 tokens/s."""
    return EngineLoad(
        f"engine-prefill-{number}",
        PlannedRole.PREFILL,
        prompt_tokens_per_second=tokens,
        prefill_tokens_per_second=1000.0,
        waiting_tokens=waiting_tokens,
    )


def decode(number: int, *, running: int = 0) -> EngineLoad:
    """An engine whose step takes 20 ms and 0.6 ms for each request; the goal of 50 ms allows for 50 of its 64 seats."""
    step = 0.02 + 0.0006 * running
    return EngineLoad(
        f"engine-decode-{number}",
        PlannedRole.DECODE,
        running=running,
        seats=64,
        step_seconds=step,
        step_requests=running,
    )


class Looks:
    """The time, and a planner that has seen batches of different sizes."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.planner = Planner(Goals(busy=0.75), limits or Limits())
        self.now = 1000.0
        self.planner.plan([prefill(0), decode(0, running=10), decode(1, running=40)], self.now)

    def look(self, engines: Sequence[EngineLoad], seconds: float = LOOK) -> Plan:
        """Plan the same load for a while; return the last plan, or the first that changes a role."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK
            plan = self.planner.plan(engines, self.now)
            if plan.flips:
                break
        return plan


def test_an_engine_is_wanted_as_soon_as_the_demand_needs_it() -> None:
    plan = Looks().look([prefill(0, tokens=900), decode(0, running=30)])
    assert plan.demand.prefill == pytest.approx(1.2)
    assert plan.demand.decode == pytest.approx(30 / 0.038 * 0.05 / 50 / 0.75)
    assert plan.wanted == {PlannedRole.PREFILL: 2, PlannedRole.DECODE: 2}
    assert plan.replicas == {"engine-prefill": 2, "engine-decode": 2}
    assert not plan.flips


def test_a_spare_engine_changes_its_role_before_one_is_added() -> None:
    looks = Looks()
    calm = [prefill(0, tokens=100), prefill(1, tokens=100), prefill(2), decode(0, running=20)]
    assert not looks.look(calm, FLIP_SECONDS + LOOK).flips
    busy = [*calm[:3], replace(decode(0, running=60), waiting=30, starts_per_second=10.0)]
    plan = looks.look(busy)
    assert [(flip.engine, flip.role) for flip in plan.flips] == [("engine-prefill-0", PlannedRole.DECODE)]
    assert plan.engines == {PlannedRole.PREFILL: 2, PlannedRole.DECODE: 2}
    assert plan.replicas == {"engine-prefill": 3, "engine-decode": 1}, "no set changes its size"


def test_a_role_that_was_just_needed_gives_nothing_up() -> None:
    looks = Looks()
    looks.look([prefill(0, tokens=900), prefill(1, tokens=900), decode(0, running=20)], FLIP_SECONDS)
    plan = looks.look([prefill(0, tokens=100), prefill(1), decode(0, running=60)])
    assert not plan.flips
    assert plan.wanted[PlannedRole.DECODE] == 2


def test_engines_are_given_up_only_after_a_window_without_need() -> None:
    looks = Looks()
    busy = [prefill(0, tokens=700), prefill(1, tokens=700), decode(0, running=30), decode(1, running=30)]
    idle = [prefill(0, tokens=100), prefill(1), decode(0, running=5), decode(1)]
    looks.look(busy, 2 * REMOVE_SECONDS)
    assert looks.look(idle, REMOVE_SECONDS - LOOK).wanted == {PlannedRole.PREFILL: 2, PlannedRole.DECODE: 3}
    assert looks.look(idle, 3 * LOOK).wanted == {PlannedRole.PREFILL: 1, PlannedRole.DECODE: 1}


def test_engines_that_were_starting_at_the_first_look_are_kept_as_long_as_the_others() -> None:
    looks = Looks()
    served = [prefill(0, tokens=100), decode(0, running=20), decode(1)]
    assert looks.look(served).wanted == {PlannedRole.PREFILL: 1, PlannedRole.DECODE: 2}
    later = [*served, prefill(1), prefill(2)]
    assert looks.look(later, FLIP_SECONDS / 2).wanted == {PlannedRole.PREFILL: 3, PlannedRole.DECODE: 2}


def test_what_was_added_is_kept_for_a_while() -> None:
    looks = Looks()
    idle = [prefill(0, tokens=100), prefill(1), decode(0, running=5)]
    looks.look(idle, 2 * REMOVE_SECONDS)
    busy = [prefill(0, tokens=700), prefill(1, tokens=700), decode(0, running=5)]
    assert looks.look(busy).wanted[PlannedRole.PREFILL] == 2
    assert looks.look(idle, KEEP_SECONDS - LOOK).wanted[PlannedRole.PREFILL] == 2
    assert looks.look(idle, 2 * LOOK).wanted[PlannedRole.PREFILL] == 1


def test_a_growing_queue_is_load_and_one_that_shrinks_is_not() -> None:
    looks = Looks()
    looks.look([prefill(0, tokens=1000), decode(0)])
    assert looks.look([prefill(0, tokens=1000, waiting_tokens=10_000), decode(0)]).demand.prefill == pytest.approx(
        2000 / 0.75 / 1000
    )
    assert looks.look([prefill(0, tokens=1000, waiting_tokens=5000), decode(0)]).demand.prefill < 1


def test_engines_of_both_roles_are_one_set() -> None:
    engine = EngineLoad(
        "engine-0",
        PlannedRole.BOTH,
        running=60,
        seats=64,
        step_seconds=0.06,
        step_requests=60,
        prompt_tokens_per_second=500,
        prefill_tokens_per_second=1000,
    )
    plan = Looks().look([engine])
    assert plan.wanted == {PlannedRole.BOTH: 2}
    assert plan.replicas == {"engine": 2}


def test_no_more_engines_are_wanted_than_there_may_be() -> None:
    plan = Looks(Limits(most=3)).look([prefill(0, tokens=5000), decode(0, running=10)])
    assert sum(plan.wanted.values()) == 3


def test_an_engine_of_unknown_speed_is_no_reason_to_add_one() -> None:
    engines = [replace(prefill(number, tokens=800), prefill_tokens_per_second=0) for number in range(2)]
    assert Looks().look([*engines, decode(0)], 2 * REMOVE_SECONDS).wanted[PlannedRole.PREFILL] == 2


def test_the_maximum_is_known_after_a_whole_window_and_forgotten_after_another() -> None:
    peak = Peak(60)
    assert peak.get(0.0) == float("inf")
    values = {0: 3.0, 20: 5.0, 40: 2.0, 60: 1.0, 80: 1.0}
    seen = {}
    for now, value in values.items():
        peak.add(now, value)
        seen[now] = peak.get(now)
    assert seen == {0: float("inf"), 20: float("inf"), 40: float("inf"), 60: 5.0, 80: 5.0}
    peak.add(100, 1.5)
    assert peak.get(100) == 2.0

"""The planner in a short simulation: calm on a constant load, and in time for one that changes."""

from dataclasses import replace

from tokenloom.bench.planner import SCENARIOS, Load, Scenario, fixed_split, simulate


def test_a_constant_load_makes_it_change_nothing_back() -> None:
    outcome = simulate(Scenario("constant", 900, lambda now: Load(12.0)), seed=1)
    assert outcome.reversals == 0
    assert outcome.changes + outcome.flips <= 3
    assert outcome.attained > 0.97


def test_it_moves_engines_when_the_work_moves() -> None:
    short = Scenario("shift", 600, lambda now: Load(24.0, 2000, 150) if now < 240 else Load(24.0, 600, 450), most=9)
    outcome = simulate(short, seed=1)
    assert outcome.flips > 0
    assert outcome.reversals == 0
    assert (
        outcome.attained
        > simulate(short, 1, fixed_split(replace(SCENARIOS[3], load_at=short.load_at), 9)).attained - 0.1
    )

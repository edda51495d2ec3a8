"""How the duration of a step is learned from batches."""

import pytest

from tokenloom.planner.demand import StepTimeModel


def test_nothing_is_promised_before_a_step_was_seen() -> None:
    assert (StepTimeModel().largest_batch(0.05), StepTimeModel().step_seconds(10)) == (0, 0)


def test_one_size_of_batch_gives_a_proportion() -> None:
    model = StepTimeModel()
    for _ in range(5):
        model.observe(100, 0.04)
    assert model.largest_batch(0.05) == pytest.approx(125)


def test_different_sizes_give_a_line_that_stays_when_the_sizes_are_alike_again() -> None:
    model = StepTimeModel()
    for running in (50, 100, 150):
        model.observe(running, 0.02 + 0.0001 * running)
    assert model.largest_batch(0.05) == pytest.approx(300)
    for _ in range(500):
        model.observe(100, 0.03)
    assert model.largest_batch(0.05) == pytest.approx(300)
    assert model.step_seconds(200) == pytest.approx(0.04)


def test_a_goal_below_the_shortest_step_leaves_one_request() -> None:
    model = StepTimeModel()
    for running in (50, 100, 150):
        model.observe(running, 0.02 + 0.0001 * running)
    assert model.largest_batch(0.01) == 1

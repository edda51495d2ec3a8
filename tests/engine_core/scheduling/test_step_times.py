"""Tests how long a step may take: by what steps of its size usually take, and never less than three seconds."""

from tokenloom.engine_core.scheduling.step_times import FIRST_SECONDS, NEW_SIZE_SECONDS, SHORTEST_SECONDS, StepTimes


def test_ten_times_the_usual_step_but_three_seconds_at_least() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(8, 0.02)
        times.observe(2048, 0.9)
    assert times.limit(8) == times.limit(15) == SHORTEST_SECONDS
    assert abs(times.limit(2048) - 9.0) < 1e-6


def test_the_first_step_of_all_and_of_a_size_may_take_longer() -> None:
    times = StepTimes()
    assert times.limit(1) == FIRST_SECONDS
    times.observe(1, 0.001)
    assert times.limit(1) == SHORTEST_SECONDS
    assert times.limit(512) == NEW_SIZE_SECONDS


def test_a_long_prefill_on_a_slow_device_is_no_false_alarm() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(1, 0.1)
    assert times.limit(8192) >= 8192 * 0.1, "in proportion to its tokens"
    times.observe(8192, 30.0)
    assert times.limit(8192) == 300.0
    assert times.limit(4096) == 300.0, "a smaller step takes no longer than a larger one"


def test_the_warm_up_bounds_the_first_steps() -> None:
    times = StepTimes(warm_up_seconds=20.0)
    assert times.limit(8192) == 200.0
    times.observe(1, 0.01)
    assert times.limit(8192) == 200.0
    assert times.limit(1) == SHORTEST_SECONDS


def test_an_outlier_changes_little_and_a_new_habit_is_learnt() -> None:
    times = StepTimes()
    for _ in range(50):
        times.observe(4, 1.0)
    times.observe(4, 100.0)
    assert times.limit(4) < 12.0
    for _ in range(50):
        times.observe(4, 5.0)
    assert 45.0 < times.limit(4) <= 50.0


def test_a_first_step_that_compiled_is_forgotten() -> None:
    times = StepTimes()
    times.observe(4, 30.0)
    for _ in range(60):
        times.observe(4, 0.02)
    assert times.limit(4) == SHORTEST_SECONDS

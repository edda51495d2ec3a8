"""How long steps take and how many prompt tokens arrive, with or without a queue."""

import pytest

from tokenloom.engine_core.data.messages import SchedulerStats
from tokenloom.services.engine.records.load import StepRates


class Steps:
    """Steps of an engine, one every so many seconds."""

    def __init__(self) -> None:
        self.rates = StepRates()
        self.now = 50.0
        self.step = self.tokens = 0

    def run(self, count: int, seconds: float, *, tokens: int = 0, running: int = 1) -> None:
        for _ in range(count):
            self.now += seconds
            self.step += 1
            self.tokens += tokens
            stats = SchedulerStats(num_running=running, num_prefilled_tokens=self.tokens)
            self.rates.observe(stats, self.step, self.now)


def test_nothing_is_known_before_the_first_step() -> None:
    rates = StepRates()
    assert (rates.step_seconds, rates.step_requests, rates.prompt_tokens_per_second(5.0)) == (0, 0, 0)


def test_averages_follow_what_the_engine_does() -> None:
    steps = Steps()
    steps.run(1000, 0.1, tokens=50)
    assert steps.rates.step_seconds == pytest.approx(0.1)
    assert steps.rates.prompt_tokens_per_second(steps.now) == pytest.approx(500, rel=0.02)
    assert steps.rates.step_requests == pytest.approx(1)
    steps.run(1000, 0.05, tokens=50, running=7)
    assert steps.rates.step_seconds == pytest.approx(0.05, rel=0.02)
    assert steps.rates.step_requests == pytest.approx(7, rel=0.02)
    assert steps.rates.prompt_tokens_per_second(steps.now) == pytest.approx(1000, rel=0.02)


def test_idle_time_lowers_the_load_and_not_the_speed() -> None:
    steps = Steps()
    steps.run(1000, 0.1, tokens=50)
    steps.run(1, 0.1, running=0)
    assert 50 < steps.rates.prompt_tokens_per_second(steps.now + 20) < 100
    assert steps.rates.prompt_tokens_per_second(steps.now + 200) == 0
    steps.run(1, 200.0)  # the first step after the pause
    assert steps.rates.step_seconds == pytest.approx(0.1)


def test_several_steps_between_two_statistics_share_the_time() -> None:
    rates = StepRates()
    rates.observe(SchedulerStats(num_running=1), 1, 10.0)
    rates.observe(SchedulerStats(num_running=1), 5, 10.4)
    assert rates.step_seconds == pytest.approx(0.1)


def test_a_pause_is_no_step() -> None:
    steps = Steps()
    steps.run(10, 0.1, tokens=50)
    steps.rates.skip()
    steps.run(1, 60.0, tokens=50)
    assert steps.rates.step_seconds == pytest.approx(0.1)
    assert steps.rates.prompt_tokens_per_second(steps.now) < 10


def test_only_steps_that_mostly_compute_prompts_measure_their_speed() -> None:
    rates = StepRates()
    computed, now = 0, 10.0
    for step, (num_tokens, seconds) in enumerate([(10, 0.01), (2058, 0.11), (40, 0.01), (1034, 0.06), (10, 0.01)]):
        computed += num_tokens
        now += seconds
        rates.observe(SchedulerStats(num_running=10, num_computed_tokens=computed), step + 1, now)
    assert rates.computed_tokens_per_second == pytest.approx((2048 + 1024) / 0.17, rel=0.01)

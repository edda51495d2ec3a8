"""How fast an engine's queue moves, measured while requests wait."""

import pytest

from tokenloom.engine_core.data.messages import SchedulerStats
from tokenloom.services.engine.records.load import DecayedRate, QueueRates


class Steps:
    """Steps of an engine with 8 seats."""

    def __init__(self) -> None:
        self.rates = QueueRates(8)
        self.now = 50.0
        self.requests = self.tokens = 0

    def step(
        self, seconds: float, *, waiting: int, running: int, begun: int = 0, tokens: int = 0, usage: float = 0.5
    ) -> None:
        self.now += seconds
        self.requests += begun
        self.tokens += tokens
        stats = SchedulerStats(
            num_waiting=waiting,
            num_running=running,
            kv_usage=usage,
            num_prefilled_requests=self.requests,
            num_prefilled_tokens=self.tokens,
        )
        self.rates.observe(stats, self.now)


def test_nothing_is_known_before_a_request_has_waited() -> None:
    steps = Steps()
    for _ in range(20):
        steps.step(1.0, waiting=0, running=5, begun=3, tokens=300)
    assert (steps.rates.starts_per_second, steps.rates.prefill_tokens_per_second) == (0, 0)
    assert steps.rates.seats == 8


def test_a_full_batch_measures_starts_and_idle_time_does_not_count() -> None:
    steps = Steps()
    for _ in range(10):
        steps.step(1.0, waiting=5, running=8, begun=4, tokens=400)
    assert steps.rates.starts_per_second == pytest.approx(4, rel=0.15)  # the first step only begins the measurement
    before = steps.rates.starts_per_second
    steps.step(1000.0, waiting=0, running=0)
    steps.step(1000.0, waiting=3, running=8)
    assert steps.rates.starts_per_second == before
    assert steps.rates.prefill_tokens_per_second == 0


def test_free_seats_measure_prompt_tokens() -> None:
    steps = Steps()
    for _ in range(10):
        steps.step(0.5, waiting=3, running=2, begun=1, tokens=1000)
    assert steps.rates.prefill_tokens_per_second == pytest.approx(2000, rel=0.15)
    assert steps.rates.starts_per_second == 0


def test_a_full_kv_cache_has_as_many_seats_as_run() -> None:
    steps = Steps()
    for _ in range(10):
        steps.step(1.0, waiting=3, running=5, begun=2, tokens=20, usage=0.95)
    assert steps.rates.seats == 5
    assert steps.rates.starts_per_second == pytest.approx(2, rel=0.15)
    steps.step(1.0, waiting=0, running=5, usage=0.95)
    assert steps.rates.seats == 8


def test_a_pause_is_left_out() -> None:
    steps = Steps()
    for _ in range(10):
        steps.step(1.0, waiting=3, running=8, begun=2)
    before = steps.rates.starts_per_second
    steps.rates.skip()
    steps.step(600.0, waiting=3, running=8)
    assert steps.rates.starts_per_second == before


def test_a_change_is_seen_after_some_requests() -> None:
    rate = DecayedRate()
    for _ in range(100):
        rate.add(0.1, 1, 1)
    assert rate.per_second == pytest.approx(10)
    for _ in range(100):
        rate.add(0.1, 10, 10)
    assert rate.per_second == pytest.approx(100, rel=0.4)


def test_a_batch_whose_requests_end_together_keeps_its_mean() -> None:
    rate = DecayedRate()
    rates = []
    for step in range(2000):  # 64 requests begin every 60 s
        rate.add(1.0, 64 if step % 60 == 59 else 0, 64 if step % 60 == 59 else 0)
        rates.append(rate.per_second)
    assert min(rates[600:]) > 0.5
    assert max(rates[600:]) < 1.5


def test_a_queue_that_does_not_move_becomes_slow() -> None:
    rate = DecayedRate()
    rate.add(1.0, 10, 10)
    rate.add(99.0, 0, 0)
    assert rate.per_second == pytest.approx(0.1)

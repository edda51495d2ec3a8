"""Which deadlines for first tokens are promised, and what forecasts teach."""

import random
from collections import Counter

import pytest

from tokenloom.request.errors import ResourceExhausted
from tokenloom.services.gateway.generation.promises import Promises


class Promising:
    """Promises with a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.promises = Promises(lambda: self.now, random.Random(1), lambda outcome: self.counts.update([outcome]))

    def run(self, expected: float, taken: float, deadline: float | None = None) -> None:
        """Answer one request whose first token comes after ``taken`` seconds."""
        forecast = self.promises.open(expected, deadline)
        self.now += taken
        forecast.begin()

    def margin(self, expected: float) -> float:
        return self.promises.margin(expected)


def test_without_experience_a_first_token_may_take_twice_as_long() -> None:
    promising = Promising()
    promising.run(1.0, 1.0, deadline=2.1)
    with pytest.raises(ResourceExhausted) as refused:
        promising.promises.open(1.0, 2.09)
    assert refused.value.field == "ttft_deadline"
    assert "about 1 s, and 2.1 s at the latest; 2.09 s cannot be promised" in refused.value.message
    assert refused.value.retry_after is not None
    assert 0.5 <= refused.value.retry_after <= 1.5
    assert promising.counts == {"kept": 1, "refused": 1}


def test_the_margin_follows_from_how_wrong_forecasts_were() -> None:
    promising = Promising()
    for number in range(400):
        promising.run(0.9, 0.9 + 0.2 * (number % 100 == 7))
    assert promising.margin(0.9) == pytest.approx(0.2)
    assert promising.margin(1.9) == pytest.approx(0.4), "a longer wait is wrong by more"
    for _ in range(600):
        promising.run(0.9, 0.9)
    assert promising.margin(0.9) == pytest.approx(0.0), "what is long ago is forgotten"
    for _ in range(600):
        promising.run(0.9, 0.4)
    assert promising.margin(0.9) == 0.0, "forecasts that are always too long grant nothing"
    assert not promising.counts, "nothing was promised"


def test_one_bad_forecast_counts_at_once() -> None:
    promising = Promising()
    promising.run(0.1, 0.9)
    assert promising.margin(0.1) == pytest.approx(0.8)


def test_what_became_of_promises() -> None:
    promising = Promising()
    promising.run(0.1, 0.5, deadline=0.5)
    promising.run(0.1, 1.5, deadline=1.0)
    gone, late, free = (promising.promises.open(0.0, deadline) for deadline in (9.0, 1.0, None))
    promising.now += 2.0
    for forecast in (gone, late, free):
        forecast.end()
    assert promising.counts == {"kept": 1, "broken": 2}, "a client that leaves before its deadline is not counted"


@pytest.mark.parametrize("seed", range(5))
def test_of_promises_by_noisy_forecasts_99_in_100_are_kept(seed: int) -> None:
    promising, rng = Promising(), random.Random(seed)
    for _ in range(5000):
        expected = rng.uniform(0.0, 1.5)
        taken = 0.05 + expected * rng.lognormvariate(0.0, 0.2)
        try:
            promising.run(expected, taken, deadline=1.5)
        except ResourceExhausted:
            promising.run(expected, taken)
    assert promising.counts["kept"] >= 0.99 * (promising.counts["kept"] + promising.counts["broken"])
    assert promising.counts["kept"] >= 2000, "not by promising nothing"

"""A peer may owe something for a while; the pauses of this process do not count."""

import pytest

from tokenloom.services.runtime.peers.patience import Patience


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def looks_until_over(patience: Patience, clock: Clock, seconds: float, most: int) -> int:
    """Return how many looks find that the patience is not over; ``most``: after which none is taken."""
    for look in range(most):
        clock.now += seconds
        if patience.is_over(owes=True):
            return look
    return most


def test_it_ends_after_the_time_however_often_one_looks(clock: Clock) -> None:
    assert looks_until_over(Patience(10.0, clock), clock, 0.5, 100) == 19
    assert looks_until_over(Patience(10.0, clock), clock, 0.25, 100) == 39


def test_it_begins_anew_when_nothing_is_owed(clock: Clock) -> None:
    patience = Patience(10.0, clock)
    assert looks_until_over(patience, clock, 0.5, 19) == 19
    clock.now += 0.5
    assert not patience.is_over(owes=False)
    assert looks_until_over(patience, clock, 0.5, 19) == 19


def test_a_pause_of_this_process_is_a_short_turn(clock: Clock) -> None:
    patience = Patience(10.0, clock)
    clock.now += 3600
    assert not patience.is_over(owes=True)
    assert looks_until_over(patience, clock, 0.5, 17) == 17

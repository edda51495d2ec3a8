"""Tokens per second, over a clock that the test moves."""

from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.limits import Reservation, TokenBucket


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def taken(bucket: TokenBucket, num_tokens: int) -> Reservation:
    reservation = bucket.take(num_tokens)
    assert reservation is not None
    return reservation


def settle(bucket: TokenBucket, reservation: Reservation, used: int) -> None:
    bucket.spend(used)
    reservation.release()


def test_a_full_bucket_serves_a_burst_and_then_the_rate() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50, clock)
    taken(bucket, 50)
    assert bucket.take(20) is None
    assert bucket.wait_seconds(20) == 2.0, "20 tokens arrive in 2 s"
    clock.now += 2
    assert bucket.wait_seconds(20) == 0.0
    taken(bucket, 20)
    assert bucket.wait_seconds(1) == 0.1


def test_it_holds_no_more_than_its_size() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50, clock)
    clock.now += 1000
    assert bucket.level == 50


def test_what_was_not_used_returns_and_what_was_used_beyond_is_owed() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50, clock)
    settle(bucket, taken(bucket, 50), 30)
    assert bucket.level == 20
    settle(bucket, taken(bucket, 20), 60)
    assert bucket.level == -40
    assert bucket.wait_seconds(10) == 5.0
    clock.now += 5
    taken(bucket, 10)


def test_a_reservation_that_returns_late_does_not_overfill_the_bucket() -> None:
    clock = Clock()
    bucket = TokenBucket(10.0, 50, clock)
    reservation = taken(bucket, 30)
    clock.now += 10
    settle(bucket, reservation, 0)
    assert bucket.level == 50


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 50), st.integers(0, 80)), max_size=50))
def test_the_long_run_stays_within_the_rate(requests: list[tuple[float, int, int]]) -> None:
    """What all requests used is at most the burst, the rate times the time, and the last request's excess."""
    clock = Clock()
    bucket = TokenBucket(10.0, 50, clock)
    used = excess = 0
    for pause, wanted, took in requests:
        clock.now += pause
        if (reservation := bucket.take(wanted)) is not None:
            settle(bucket, reservation, took)
            used += took
            excess = max(took - wanted, 0)
            assert used <= 50 + 10 * (clock.now - 100) + excess + 1e-6

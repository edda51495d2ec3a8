"""The retries that a part of the mesh may make."""

import pytest

from tokenloom.request.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    RateLimitExceeded,
    ResourceExhausted,
    TokenloomError,
    TryElsewhere,
    Unavailable,
)
from tokenloom.services.runtime.peers.retry_budget import MAX_RETRIES, RetryBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_retry_of_every_request_is_free() -> None:
    budget = RetryBudget(Clock())
    for _ in range(1000):  # all requests of a part that died
        assert budget.allow(Unavailable("died"), num_retries=0)
        assert budget.allow(TryElsewhere("drains"), num_retries=0)
    assert budget.left == MAX_RETRIES


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhausted("full"),
        RateLimitExceeded("quota"),
        InvalidArgument("wrong"),
        DeadlineExceeded("late"),
        Internal(),
    ],
)
def test_overload_and_lasting_errors_are_never_retried(error: TokenloomError) -> None:
    budget = RetryBudget(Clock())
    assert not budget.allow(error, num_retries=0)
    assert not budget.allow(error, num_retries=1)
    assert budget.left == MAX_RETRIES


def test_further_retries_are_a_tenth_of_the_requests() -> None:
    budget = RetryBudget(Clock())
    while budget.allow(Unavailable("died"), num_retries=1):  # use up the reserve
        pass
    retries = 0
    for _ in range(1000):
        budget.add_request()
        retries += budget.allow(Unavailable("died"), num_retries=1)
    assert 99 <= retries <= 100


def test_a_quiet_mesh_earns_retries_with_time() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    retries = 0
    while budget.allow(Unavailable("died"), num_retries=3):
        retries += 1
    assert retries == MAX_RETRIES
    clock.now += 1.0
    assert budget.allow(Unavailable("died"), num_retries=3)
    assert not budget.allow(Unavailable("died"), num_retries=3)
    clock.now += 3600
    assert budget.left == MAX_RETRIES

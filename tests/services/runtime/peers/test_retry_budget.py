"""The retries that a part of the mesh may make."""

import pytest

from tokenloom.request.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineLacks,
    Internal,
    InvalidArgument,
    RateLimitExceeded,
    ResourceExhausted,
    TokenloomError,
    TryElsewhere,
    Unavailable,
    Unimplemented,
)
from tokenloom.services.runtime.peers.retry_budget import MAX_RETRIES, Cause, RetryBudget, RetryDebt, cause_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (TryElsewhere("drains"), Cause.GONE),
        (EngineDied("died"), Cause.GONE),
        (Unavailable("no answer"), Cause.SILENT),
        (ResourceExhausted("full"), Cause.FULL),
        (EngineLacks("no grammars"), Cause.UNFIT),
        (Unimplemented("no such call"), None),
        (RateLimitExceeded("quota"), None),
        (InvalidArgument("wrong"), None),
        (DeadlineExceeded("late"), None),
        (Internal(), None),
    ],
)
def test_the_cause_follows_from_the_error(error: TokenloomError, cause: Cause | None) -> None:
    assert cause_of(error) is cause


def test_moves_from_parts_that_are_gone_are_free() -> None:
    budget = RetryBudget(Clock())
    for _ in range(1000):  # all requests of a part that died, twice
        debt = RetryDebt(budget)
        for _ in range(2):
            debt.failed(Cause.GONE)
            assert debt.pay()
    assert budget.left == MAX_RETRIES


def test_the_first_retry_after_silence_is_free_and_further_ones_cost_until_there_is_progress() -> None:
    budget = RetryBudget(Clock())
    for _ in range(1000):
        debt = RetryDebt(budget)
        debt.failed(Cause.SILENT)
        assert debt.pay()
    assert budget.left == MAX_RETRIES
    debt.failed(Cause.SILENT)
    assert debt.pay()
    assert debt.pay(), "one attempt is paid once"
    assert budget.left == MAX_RETRIES - 1
    debt.failed(Cause.SILENT, made_progress=True)
    assert debt.pay()
    assert budget.left == MAX_RETRIES - 1


def test_a_part_that_was_silent_and_is_back_costs_nothing() -> None:
    budget = RetryBudget(Clock())
    while budget.take():
        pass
    debt, is_back = RetryDebt(budget), False
    for _ in range(2):
        debt.failed(Cause.SILENT, is_back=lambda: is_back)
    assert not debt.pay()
    is_back = True
    assert debt.pay()
    debt.failed(Cause.FULL)
    assert not debt.pay(), "another part had it meanwhile"


def test_a_refusal_always_costs() -> None:
    budget = RetryBudget(Clock())
    allowed = 0
    for _ in range(100):
        debt = RetryDebt(budget)
        debt.failed(Cause.FULL)
        allowed += debt.pay()
    assert allowed == MAX_RETRIES


def test_charged_retries_are_a_tenth_of_the_requests() -> None:
    budget = RetryBudget(Clock())
    while budget.take():  # use up the reserve
        pass
    retries = 0
    for _ in range(1000):
        budget.add_request()
        retries += budget.take()
    assert 99 <= retries <= 100


def test_a_quiet_mesh_earns_retries_with_time() -> None:
    clock = Clock()
    budget = RetryBudget(clock)
    while budget.take():
        pass
    debt = RetryDebt(budget)
    debt.failed(Cause.FULL)
    assert not debt.pay()
    clock.now += 1.0
    assert debt.pay()
    assert not budget.take()
    clock.now += 3600
    assert budget.left == MAX_RETRIES

"""When a failed call is made again."""

import pytest

from tokenloom.client import Retries, errors

FULL = errors.ResourceExhausted("full", retry_after=0.5)


def test_waits_grow_and_never_fall_below_what_the_mesh_said() -> None:
    retries = Retries(max_retries=3, budget=100)
    waits = [retries.wait(FULL, failures, 60) for failures in range(4)]
    assert waits[3] is None
    for wait, least in zip(waits, (0.5, 1.0, 2.0), strict=False):
        assert wait is not None
        assert least <= wait <= least * 1.2


@pytest.mark.parametrize("error", [errors.InvalidArgument("x"), errors.Internal(), errors.DeadlineExceeded("x")])
def test_only_what_may_go_well_later(error: errors.TokenloomError) -> None:
    assert Retries().wait(error, 0, 60) is None


def test_not_past_the_deadline() -> None:
    assert Retries().wait(FULL, 0, 0.4) is None


def test_the_budget_is_spent_and_comes_back() -> None:
    retries = Retries(budget=4)
    assert [retries.wait(FULL, 0, 60) is not None for _ in range(4)] == [True, True, False, False]
    for _ in range(40):
        retries.succeeded()
    assert retries.wait(FULL, 0, 60) is not None


def test_lost_connections_cost_no_budget() -> None:
    """Many streams that lose one gateway together do not use up each other's retries."""
    retries = Retries(budget=4)
    assert all(retries.wait(FULL, 1, 60, reached_mesh=False) for _ in range(16))
    assert retries.wait(FULL, 0, 60) is not None
    assert retries.wait(FULL, 4, 60, reached_mesh=False) is None

"""Bytes are reserved up to a limit, and returned."""

import pytest

from tokenloom.request import errors
from tokenloom.services.gateway.http.byte_budget import ByteBudget


def test_more_than_the_limit_is_refused_for_now() -> None:
    budget = ByteBudget(10)
    seven = budget.reserve(7)
    with pytest.raises(errors.ResourceExhausted) as refused:
        budget.reserve(4)
    assert (refused.value.http_status, refused.value.retry_after) == (503, 1.0)
    budget.reserve(3)
    assert budget.taken == 10
    seven.release()
    budget.reserve(4)
    assert budget.taken == 7

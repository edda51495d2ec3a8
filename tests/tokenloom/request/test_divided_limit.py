"""How a limit of the gateway is divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.limits import DividedLimit


def fill(room: DividedLimit, held: int = 0) -> int:
    """Let a tenant take places one by one until it is refused; return how many it holds."""
    while room.take(1, held) is not None:
        held += 1
    return held


@pytest.mark.parametrize(("num_greedy", "expected"), [(1, [50]), (2, [50, 25]), (3, [50, 25, 13])])
def test_greedy_tenants_leave_room_for_one_more(num_greedy: int, expected: list[int]) -> None:
    room = DividedLimit(100, is_divided=True)
    assert [fill(room) for _ in range(num_greedy)] == expected
    assert room.take(1, 0) is not None


def test_tenants_that_want_everything_come_to_equal_parts() -> None:
    """Each one's requests end now and then, and it asks for more at once."""
    room = DividedLimit(100, is_divided=True)
    held = [room.empty() for _ in range(3)]
    for each in held:
        while (place := room.take(1, each.amount)) is not None:
            each.absorb(place)
    for turn in range(300):
        tenant = turn % 3
        held[tenant].release(1)
        for other in ((tenant + 1) % 3, (tenant + 2) % 3, tenant):
            if (place := room.take(1, held[other].amount)) is not None:
                held[other].absorb(place)
    amounts = [each.amount for each in held]
    assert max(amounts) - min(amounts) <= 1
    assert sum(amounts) in (75, 76)


def test_a_gateway_with_one_tenant_does_not_divide() -> None:
    room = DividedLimit(100, is_divided=False)
    assert fill(room) == 100


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_request_above_the_whole_limit_runs_alone(is_divided: bool) -> None:
    room = DividedLimit(4, is_divided=is_divided)
    alone = room.take(8, 0)
    assert alone is not None
    assert room.take(1, 0) is None
    alone.release()
    assert room.take(1, 0) is not None
    assert room.take(8, 0) is None


@given(st.integers(2, 64), st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), max_size=200))
def test_no_tenant_holds_more_than_was_free(size: int, steps: list[tuple[int, int]]) -> None:
    room = DividedLimit(size, is_divided=True)
    held = [room.empty() for _ in range(5)]
    for tenant, change in steps:
        if change < 0:
            held[tenant].release(min(-change, held[tenant].amount))
        elif change and room.taken:
            before = size - room.taken
            if (places := room.take(change, held[tenant].amount)) is not None:
                held[tenant].absorb(places)
                assert held[tenant].amount <= before
        elif change == 1:
            first = room.take(1, held[tenant].amount)
            assert first is not None, "the first one always finds a place"
            held[tenant].absorb(first)
        assert room.taken == sum(each.amount for each in held) <= size

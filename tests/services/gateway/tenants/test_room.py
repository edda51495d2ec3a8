"""How a limit of the gateway is divided."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.gateway.tenants.room import Room


def fill(room: Room, held: int = 0) -> int:
    """Let a tenant take places one by one until it is refused; return how many it holds."""
    while room.take(held, 1):
        held += 1
    return held


@pytest.mark.parametrize(("num_greedy", "expected"), [(1, [50]), (2, [50, 25]), (3, [50, 25, 13])])
def test_greedy_tenants_leave_room_for_one_more(num_greedy: int, expected: list[int]) -> None:
    room = Room(100, is_divided=True)
    assert [fill(room) for _ in range(num_greedy)] == expected
    assert room.take(0, 1)


def test_tenants_that_want_everything_come_to_equal_parts() -> None:
    """Each one's requests end now and then, and it asks for more at once."""
    room = Room(100, is_divided=True)
    held = [fill(room) for _ in range(3)]
    for turn in range(300):
        tenant = turn % 3
        room.give_back(1)
        held[tenant] -= 1
        others = [(tenant + 1) % 3, (tenant + 2) % 3, tenant]
        for other in others:
            if room.take(held[other], 1):
                held[other] += 1
    assert max(held) - min(held) <= 1
    assert sum(held) in (75, 76)


def test_a_gateway_with_one_tenant_does_not_divide() -> None:
    room = Room(100, is_divided=False)
    assert fill(room) == 100


@pytest.mark.parametrize("is_divided", [False, True])
def test_a_request_above_the_whole_limit_runs_alone(is_divided: bool) -> None:
    room = Room(4, is_divided=is_divided)
    assert room.take(0, 8)
    assert not room.take(0, 1)
    room.give_back(8)
    assert room.take(0, 1)
    assert not room.take(0, 8)


@given(st.integers(2, 64), st.lists(st.tuples(st.integers(0, 4), st.integers(-3, 3)), max_size=200))
def test_no_tenant_holds_more_than_was_free(size: int, steps: list[tuple[int, int]]) -> None:
    room = Room(size, is_divided=True)
    held = [0] * 5
    for tenant, change in steps:
        if change < 0:
            returned = min(-change, held[tenant])
            room.give_back(returned)
            held[tenant] -= returned
        elif change and room.taken:
            before = size - room.taken
            if room.take(held[tenant], change):
                held[tenant] += change
                assert held[tenant] <= before
        elif change == 1:
            assert room.take(held[tenant], 1), "the first one always finds a place"
            held[tenant] += 1
        assert room.taken == sum(held) <= size

"""The turns that a gateway remembers: found by their blocks, within the tenant, bounded by bytes and time."""

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.gateway.generation.past_turns import (
    MAX_SECONDS,
    ChatDigest,
    GeneratedSpan,
    PastTurn,
    PastTurns,
    num_common,
)

CHAT = ChatDigest((), b"", b"")
BLOCK = 4


def packed(ids: Sequence[int]) -> bytes:
    return array("I", ids).tobytes()


def turn(name: str, ids: Sequence[int]) -> PastTurn:
    """Its hashes are those of a chain of blocks."""
    return PastTurn(
        answer=name,
        chat=CHAT,
        tokens=packed(ids),
        num_prompt=len(ids),
        spans=(GeneratedSpan(0, len(ids)),),
        hashes=hashes(ids),
        salt=b"",
        adapter=b"",
        engine="e1",
        num_reasoning=0,
        opens_reasoning=False,
    )


def hashes(ids: Sequence[int]) -> list[int]:
    return [hash(tuple(ids[:end])) & (2**64 - 1) for end in range(BLOCK, len(ids) + 1, BLOCK)]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def found(past: PastTurns, ids: Sequence[int], tenant: str = "one") -> str | None:
    """The name of what a prompt continues."""
    turn = past.find(tenant, packed(ids), hashes(ids))
    return None if turn is None else turn.answer


def test_the_turn_that_shares_most_is_found() -> None:
    past = PastTurns(Clock())
    past.put("one", turn("a", range(40)), None)
    past.put("one", turn("b", [*range(20), *range(100, 120)]), None)
    assert found(past, range(50)) == "a"
    assert found(past, [*range(20), *range(100, 150)]) == "b"
    assert found(past, [*range(16), *range(200, 220)]) == "b", "the latest of both"
    assert found(past, range(500, 600)) is None
    assert found(past, range(50), "two") is None


def test_turns_are_known_by_their_answers_within_the_tenant() -> None:
    past = PastTurns(Clock())
    past.put("one", turn("a", range(40)), None)
    assert past.of_answer("one", "a") is not None
    assert past.of_answer("two", "a") is None
    assert past.of_answer("one", "b") is None


def test_a_turn_replaces_the_one_that_it_continues_and_the_one_of_its_name() -> None:
    past = PastTurns(Clock())
    first = turn("a", range(40))
    past.put("one", first, None)
    past.put("one", turn("b", range(60)), first)
    past.put("one", turn("b", range(64)), None)
    assert len(past) == 1
    assert found(past, range(44)) == "b"


def test_turns_are_forgotten_after_a_time_also_those_of_tenants_that_left() -> None:
    clock = Clock()
    past = PastTurns(clock)
    past.put("one", turn("a", range(40)), None)
    clock.now = MAX_SECONDS
    past.put("two", turn("b", range(40)), None)
    assert found(past, range(40)) == "a"
    clock.now += 1
    past.put("two", turn("c", range(100, 140)), None)
    past.put("two", turn("d", range(200, 240)), None)
    assert (len(past), found(past, range(40))) == (3, None)


def test_the_largest_tenant_loses_its_oldest_turn() -> None:
    size = turn("a", range(400)).num_bytes
    past = PastTurns(Clock(), max_bytes=3 * size)
    past.put("small", turn("s", range(400)), None)
    for index in range(4):
        past.put("large", turn(str(index), range(1000 * index, 1000 * index + 400)), None)
    assert (len(past), found(past, range(400), "small")) == (3, "s")
    assert [past.of_answer("large", str(index)) is not None for index in range(4)] == [False, False, True, True]
    past.put("huge", turn("h", range(4000)), None)
    assert past.of_answer("huge", "h") is None
    assert len(past) == 3


@pytest.mark.parametrize("number", [0, 1, 2, 7, 100])
def test_sequences_that_are_equal(number: int) -> None:
    assert num_common(packed(range(number)), packed(range(number + 3))) == number


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_the_common_beginning(begin: list[int], one: list[int], other: list[int]) -> None:
    first, second = begin + one, begin + other
    expected = next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    assert num_common(packed(first), packed(second)) == expected

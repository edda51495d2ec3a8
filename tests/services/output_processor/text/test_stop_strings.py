"""Compares with a definition that keeps the whole text: same shown text, same match, nothing held without need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.services.output_processor.text.detokenizer import Match, StopStrings

pieces = st.lists(st.text("ab.", max_size=4), max_size=12)
stops = st.lists(st.text("ab.", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(whole: str, stop: list[str]) -> tuple[int, str] | None:
    """Where the first stop string to be completed ends, and which it is."""
    for end in range(1, len(whole) + 1):
        for string in stop:
            if whole[:end].endswith(string):
                return end, string
    return None


@given(pieces=pieces, stop=stops, include=st.booleans())
def test_equals_searching_the_whole_text(pieces: list[str], stop: list[str], include: bool) -> None:
    matcher = StopStrings(stop, include)
    shown = whole = ""
    for piece in pieces:
        whole += piece
        found = matcher.feed(piece)
        expected = first_match(whole, stop)
        if isinstance(found, Match):
            assert expected is not None
            end, string = expected
            assert found.stop_string == string
            assert shown + found.text == whole[: end if include else end - len(string)]
            return
        assert expected is None
        shown += found
        held = whole[len(shown) :]
        assert shown + held == whole
        assert not held or any(string.startswith(held) for string in stop), "held without need"
        assert not any(
            string.startswith(whole[start:]) for start in range(len(shown)) for string in stop if whole[start:]
        ), "shown too early"
    assert shown + matcher.finish() == whole


@given(pieces=pieces, stop=stops, num_passed=st.integers(0, 6))
def test_what_was_passed_over_completes_nothing_but_may_begin_a_match(
    pieces: list[str], stop: list[str], num_passed: int
) -> None:
    matcher = StopStrings(stop)
    shown = whole = ""
    for piece in pieces[:num_passed]:
        shown += matcher.pass_over(piece)
        whole += piece
    for piece in pieces[num_passed:]:
        found = matcher.feed(piece)
        ends = range(len(whole) + 1, len(whole + piece) + 1)
        whole += piece
        expected = next(((end, string) for end in ends for string in stop if whole[:end].endswith(string)), None)
        if isinstance(found, Match):
            assert expected is not None
            end, string = expected
            assert (found.stop_string, shown + found.text) == (string, whole[: end - len(string)])
            return
        assert expected is None
        shown += found
    assert shown + matcher.finish() == whole


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["b", "ab"], "xab", Match("b", "xa")),  # both end together: the first in the list
        (["ab", "b"], "xab", Match("ab", "x")),
        (["abc", "b"], "xabc", Match("b", "xa")),  # ends first, though it begins later
        (["\n\n"], "one\n", "one"),
        (["\n\n"], "one\ntwo", "one\ntwo"),
    ],
)
def test_examples(stop: list[str], text: str, expected: str | Match) -> None:
    assert StopStrings(stop).feed(text) == expected

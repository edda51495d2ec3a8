import random
import re

import pytest

from tokenloom.request.schema_pattern import portable_pattern, whole_pattern

PARTS = (
    *(
        "a",
        "b",
        "(",
        "(?:",
        "(?=",
        "(?!",
        ")",
        "|",
        "*",
        "+",
        "?",
        "{2}",
        "{1,3}",
        "{",
        "}",
        "[",
        "]",
        "[^",
        r"\d",
        "^",
    ),
    *(r"\b", r"\1", "$", ".", r"\.", "-", r"\/", "&", "~", "a-z", "é", " "),
)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^[a-z]+$", r"^[a-z]+$"),
        (r"\A\d{3}\Z", r"^\d{3}$"),
        (r"{a}[&[]", r"\{a\}[\&\[]"),
        (r"[^]\cA\0", r"[\s\S]\x01\x00"),
        (r"\uD83D\uDE00", r"\u{1f600}"),
        (r"[\w-.]", r"[\w\-.]"),
        (r"(?:^a$)|^b$", r"(?:^a$)|^b$"),
    ],
)
def test_the_same_texts_are_matched_in_the_common_spelling(pattern: str, text: str) -> None:
    portable = portable_pattern(pattern)
    assert portable is not None
    assert (portable.text, portable.is_exact) == (text, True)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^(?!\.)(?!.*\.\.)a$", "^(?:)(?:)a$"),
        (r"a(?=b(c)[)])d", "a(?:)d"),
        (r"\bword\b", "(?:)word(?:)"),
        (r"(a|b)\1", "(a|b)(?s:.*)"),
        (r"(a$|b)c", "(a(?:)|b)c"),
    ],
)
def test_what_no_grammar_expresses_is_left_out(pattern: str, text: str) -> None:
    portable = portable_pattern(pattern)
    assert portable is not None
    assert (portable.text, portable.is_exact) == (text, False)


@pytest.mark.parametrize(
    "pattern",
    ["(", "a)", "*a", "[", "[z-a]", "[]", r"\e", r"\p{Nothing}", r"[\u{12345678}]", r"[\p{Alphabet}]", "a(?=b"],
)
def test_what_is_malformed_or_unknown_has_no_expression(pattern: str) -> None:
    assert portable_pattern(pattern) is None


@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_no_text_is_lost() -> None:
    chance = random.Random(7)
    compared = 0
    for _ in range(3000):
        pattern = "".join(chance.choices(PARTS, k=chance.randint(1, 9)))
        portable = portable_pattern(pattern)
        if portable is None:
            continue
        try:
            before, after = re.compile(pattern), re.compile(portable.text)
        except re.error:  # some of what ECMA allows means nothing to Python
            continue
        for _ in range(20):
            text = "".join(chance.choices("ab-.1é &", k=chance.randint(0, 5)))
            compared += 1
            assert not before.search(text) or after.search(text), (pattern, portable.text, text)
    assert compared > 5000


@pytest.mark.parametrize(
    ("pattern", "whole", "other"),
    [
        ("b+", ["abbc", "b\n"], ["ac"]),
        ("^b", ["bc"], ["ab"]),
        ("b$", ["ab"], ["ba"]),
        ("^a$|b", ["a", "xbx"], ["aa"]),
        ("(?i)^a[|$]$", ["A$", "a|"], ["a"]),
        (r"^\^\$$", ["^$"], ["a"]),
        ("^(?:a$|b)", ["a", "bc", "ac"], ["c"]),  # an anchor within a group is left out
        ("", ["", "x"], []),
    ],
)
def test_the_whole_texts_in_which_a_pattern_is_found(pattern: str, whole: list[str], other: list[str]) -> None:
    expression = re.compile(whole_pattern(pattern))
    assert all(expression.fullmatch(text) for text in whole)
    assert not any(expression.fullmatch(text) for text in other)

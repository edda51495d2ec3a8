from collections.abc import Sequence

import numpy as np
import pytest

from tests.engine_core.structured_output.helpers import EOS, NUM_WORDS, encode, start
from tokenloom.engine_core.data.core_params import GrammarKind
from tokenloom.engine_core.structured_output.grammar_backend import GrammarError, bitmask_of
from tokenloom.engine_core.structured_output.request_constraint import GrammarEnd, RequestGrammar

NEWLINE = encode("\n")[0]
NUM_OUTPUT_TOKENS = 3
"""Fewer than any ``min_tokens`` below."""


def follow(regex: str, text: str, stop: Sequence[int] = (EOS,), min_tokens: int = 0) -> RequestGrammar:
    eos = bitmask_of([EOS], NUM_WORDS)
    grammar = RequestGrammar(start(GrammarKind.REGEX, regex), eos, stop, min_tokens)
    grammar.accept(encode(text))
    return grammar


def tokens(grammar: RequestGrammar) -> set[int]:
    row = np.zeros(NUM_WORDS, dtype=np.int32)
    grammar.fill(row, NUM_OUTPUT_TOKENS)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def test_a_bitmask_has_the_bits_of_its_tokens() -> None:
    assert bitmask_of([0, 33], 2).tolist() == [1, 2]
    assert bitmask_of([31, 64], 2).tolist() == [-(1 << 31), 0]  # there is no room for 64
    assert bitmask_of([7], 1).dtype == np.int32


def test_a_complete_text_is_followed_by_stop_tokens_alone() -> None:
    assert tokens(follow("ab", "ab")) == {EOS}
    assert tokens(follow("ab", "ab", stop=(EOS, NEWLINE))) == {EOS, NEWLINE}
    assert tokens(follow("ab", "ab", stop=(NEWLINE,))) == {NEWLINE}


def test_a_text_that_may_end_or_continue_allows_both() -> None:
    both = tokens(follow("a+", "a"))
    assert EOS in both
    assert encode("a")[0] in both
    assert EOS not in tokens(follow("a+", "a", stop=()))
    assert EOS not in tokens(follow("a+", "a", stop=(NEWLINE,)))


def test_without_a_stop_token_the_end_is_the_requests() -> None:
    with pytest.raises(GrammarEnd):
        tokens(follow("ab", "ab", stop=()))


def test_min_tokens_keeps_stop_tokens_away_and_yields_to_the_grammar() -> None:
    assert EOS not in tokens(follow("a+", "a", min_tokens=5))
    assert encode("a")[0] in tokens(follow("a+", "a", min_tokens=5))
    with pytest.raises(GrammarEnd):
        tokens(follow("ab", "ab", min_tokens=50))


def test_a_token_that_the_grammar_forbids_is_an_error() -> None:
    with pytest.raises(GrammarError, match="does not follow"):
        follow("ab", "x")

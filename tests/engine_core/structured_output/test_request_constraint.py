from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine_core.structured_output.helpers import EOS, NUM_WORDS, encode, start
from tokenloom.engine_core.data.core_params import GrammarKind
from tokenloom.engine_core.structured_output.grammar_backend import Bitmask, GrammarError, bitmask_of
from tokenloom.engine_core.structured_output.request_constraint import GrammarEnd, RequestConstraint, RequestGrammar
from tokenloom.request.reasoning import Reasoning, ReasoningMarks

START, END = 2001, 2002
ONE = ReasoningMarks((START,), (END,), begins_inside=False)
OPEN = ReasoningMarks((START,), (END,), begins_inside=True)
TEXT = ReasoningMarks(tuple(encode("<think>")), tuple(encode("</think>")), begins_inside=False)
(AB,), (A,), (B,) = encode("ab"), encode("a"), encode("b")
EVERY = None


def constraint(
    marks: ReasoningMarks,
    prompt: Sequence[int],
    regex: str | None = "ab",
    *,
    budget: int | None = None,
    min_tokens: int = 0,
) -> RequestConstraint:
    eos = bitmask_of([EOS], NUM_WORDS)
    grammar = None if regex is None else RequestGrammar(start(GrammarKind.REGEX, regex), eos, (EOS,), min_tokens)
    return RequestConstraint(grammar, Reasoning(marks, prompt), budget)


def after(follower: RequestConstraint, output: Sequence[int]) -> set[int] | None:
    """Return what may follow; None: every token."""
    follower.accept(output)
    row = np.zeros(NUM_WORDS, dtype=np.int32)
    if not follower.fill(row):
        return EVERY
    return _tokens(row)


def test_a_grammar_begins_after_the_reasoning() -> None:
    for cut in range(3):
        assert after(constraint(ONE, [START]), [5, 6, 7][:cut]) is EVERY
    follower = constraint(ONE, [START])
    assert AB in (after(follower, [5, 6, END]) or ())
    assert after(follower, encode("ab")) == {EOS}


def test_a_prompt_that_closes_the_reasoning_begins_with_the_grammar() -> None:
    expected = after(constraint(ONE, [START, END]), [])
    assert expected is not None
    assert START not in expected
    assert B not in expected


def test_while_it_is_open_whether_the_model_reasons_its_start_mark_is_allowed_too() -> None:
    closed = after(constraint(ONE, [START, END]), [])
    assert closed is not None
    assert after(constraint(ONE, [3]), []) == closed | {START}
    assert after(constraint(ONE, [3]), [START]) is EVERY
    assert after(constraint(ONE, [3]), encode("ab")) == {EOS}
    with pytest.raises(GrammarError):
        constraint(ONE, [3]).accept(encode("b"))


def test_a_start_mark_of_several_tokens_may_be_the_answers_beginning() -> None:
    first, second, *_ = TEXT.start
    mark = "<think>"
    only_mark = after(constraint(TEXT, [3]), [first])
    assert only_mark == {second}  # the grammar does not begin with it
    both = after(constraint(TEXT, [3], "<[tx]+>"), [first])
    assert both is not None
    assert both > {second}
    assert after(constraint(TEXT, [3], "<[tx]+>"), encode("<x>")) == {EOS}
    assert after(constraint(TEXT, [3], "<[tx]+>"), encode(mark)) is EVERY


def test_a_budget_forces_the_end_mark_token_by_token() -> None:
    follower = constraint(TEXT, TEXT.start, budget=2)
    assert after(follower, [5]) is EVERY
    output = [6]
    for token_id in TEXT.end:
        assert after(follower, output) == {token_id}
        assert follower.forced == token_id
        output = [token_id]
    assert AB in (after(follower, output) or ())
    assert follower.forced is None


def test_a_budget_of_nothing_closes_what_is_open_only() -> None:
    assert after(constraint(ONE, [START], None, budget=0), []) == {END}
    assert after(constraint(OPEN, [3], None, budget=0), []) == {END}
    assert after(constraint(ONE, [3], None, budget=0), []) is EVERY
    assert after(constraint(ONE, [3], None, budget=0), [START]) == {END}
    assert after(constraint(ONE, [START, END], None, budget=0), [5]) is EVERY


def test_a_reasoning_that_ended_before_its_budget_is_left_alone() -> None:
    follower = constraint(ONE, [START], None, budget=3)
    assert after(follower, [5, END]) is EVERY
    assert not follower.may_bind(10**6)
    assert after(follower, [5] * 10) is EVERY


def test_min_tokens_count_the_reasoning() -> None:
    assert EOS in (after(constraint(ONE, [START], "a+", min_tokens=5), [5, 6, 7, END, A]) or ())
    assert EOS not in (after(constraint(ONE, [START], "a+", min_tokens=6), [5, 6, 7, END, A]) or ())


@given(st.data())
def test_a_constraint_that_may_not_bind_does_not(data: st.DataObject) -> None:
    """What is skipped because no token can be bound yet gives the same as following every token."""
    marks = data.draw(st.sampled_from([ONE, OPEN, TEXT]))
    prompt = data.draw(st.sampled_from([[3], [*marks.start], [*marks.start, 4, *marks.end], [*marks.end, 3, 3, 3]]))
    tokens = st.lists(st.sampled_from(sorted({*marks.start, *marks.end, 5})), max_size=12)
    output, budget = data.draw(tokens), data.draw(st.integers(0, 8))
    lazy = constraint(marks, prompt, None, budget=budget)
    for cut in range(len(output) + 1):
        eager = constraint(marks, prompt, None, budget=budget)
        expected = after(eager, output[:cut])
        unseen = output[lazy.num_seen : cut]
        assert (after(lazy, unseen) if lazy.may_bind(len(unseen)) else EVERY) == expected


def test_drafts_are_cut_where_the_grammar_forbids_one() -> None:
    follower = constraint(ONE, [START], "a{2}b{2}")
    assert follower.num_allowed([], [5, END, A, A, B, A, B]) == 5
    assert follower.num_allowed([5, END, A], [A, B, B, B]) == 3
    assert follower.num_allowed([5, END, A], [B]) == 0
    follower.accept([5, END, A])
    assert follower.num_allowed([A], [B, A]) == 1
    assert B in (after(follower, [A]) or ())


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_rows_for_drafts_are_those_after_each_of_them(data: st.DataObject) -> None:
    """One call for several drafts gives what following them one by one does, and leaves no trace."""
    marks = data.draw(st.sampled_from([ONE, OPEN, TEXT]))
    prompt = data.draw(st.sampled_from([[3], [*marks.start], [*marks.start, 4, *marks.end]]))
    regex = data.draw(st.sampled_from(["(ab|b)+", "a{2,3}", "<[tx]+>", None]))
    limits = {"budget": data.draw(st.none() | st.integers(0, 4)), "min_tokens": data.draw(st.sampled_from([0, 3]))}
    choices = st.sampled_from(sorted({*marks.start, *marks.end, AB, A, B, 5, EOS, *encode("<x>")}))
    output, follower = list[int](), constraint(marks, prompt, regex, **limits)
    for _ in range(6):
        drafts = data.draw(st.lists(choices, max_size=5))
        follower.accept(output[follower.num_seen :])
        rows = np.zeros((1 + len(drafts), NUM_WORDS), dtype=np.int32)
        try:
            num_rows = follower.fill_rows(rows, drafts)
        except (GrammarEnd, GrammarError):
            return
        assert follower.num_seen == len(output)
        for place in range(num_rows or 1 + len(drafts)):
            eager = constraint(marks, prompt, regex, **limits)
            expected = after(eager, output + drafts[:place])
            if num_rows:
                assert _tokens(rows[place]) == (_tokens(FREE) if expected is EVERY else expected)
                assert eager.forced is None or (place == 0 and eager.forced == follower.forced)
            else:
                assert expected is EVERY
        allowed = _tokens(rows[0]) if num_rows else _tokens(FREE)
        likely = [
            token_id for token_id in (*drafts[:1], AB, A, B, 5, *marks.end, *encode("<x>")) if token_id in allowed
        ]
        if not likely or likely[0] == EOS:
            return
        output.append(likely[0])


FREE = np.full(NUM_WORDS, -1, dtype=np.int32)


def _tokens(row: Bitmask) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())

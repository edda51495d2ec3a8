from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.reasoning import (
    FORMATS,
    Reasoning,
    ReasoningMarks,
    ReasoningStart,
    format_of_template,
    marks_of,
    reasoning_format,
)
from tokenloom.v1 import types_pb2

START, END = 1, 2
ONE = ReasoningMarks((START,), (END,), begins_inside=False)
OPEN = ReasoningMarks((START,), (END,), begins_inside=True)
LONG = ReasoningMarks((7, 8, 9), (7, 6, 7, 5), begins_inside=False)
LONG_OPEN = ReasoningMarks((7, 8, 9), (7, 6, 7, 5), begins_inside=True)


CALLS = ReasoningMarks((1, 10, 3), (1, 12, 3), begins_inside=True, aside=(1, 11))
"""As gpt-oss has them: 1 begins a channel, 10 is analysis, 11 commentary, 12 final, and 3 ends a header."""


def follow(marks: ReasoningMarks, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, list[int], bool]:
    """Return the number of reasoning tokens, the answer's tokens, and whether the reasoning is over."""
    reasoning = Reasoning(marks, prompt)
    answer = list(reasoning.feed(output))
    return reasoning.num_tokens, answer, reasoning.is_over


@pytest.mark.parametrize(
    ("marks", "prompt", "output", "expected"),
    [
        (ONE, [START], [5, 6, END, 9], (2, [9], True)),
        (CALLS, [], [1, 10, 3, 5, 6, 7, 2, 1, 11, 4, 3, 8, 8, 2], (4, [], False)),  # a call after the reasoning
        (CALLS, [], [1, 10, 3, 5, 2, 1, 11, 3, 8, 2, 1, 10, 3, 6, 6], (4, [], False)),  # more reasoning after a call
        (CALLS, [], [1, 10, 3, 5, 2, 1, 11, 3, 8, 2, 1, 12, 3, 9], (2, [9], True)),  # a text before the answer
        (CALLS, [], [1, 11, 4, 3, 8, 8, 2], (0, [], False)),  # a call alone
        (ONE, [START, 4], [5, 6], (2, [], False)),
        (ONE, [3], [START, 5, END, 9], (1, [9], True)),  # the model opens it
        (ONE, [3], [5, END, 9], (0, [5, END, 9], True)),  # it does not
        (ONE, [3, START, 4, END, 4], [9], (0, [9], True)),  # the template closed it
        (ONE, [3, START, 4, END, 4, 4, 4], [START, 5, END, 9], (1, [9], True)),  # that was an earlier turn's
        (OPEN, [3], [5, END, 9], (1, [9], True)),
        (OPEN, [3], [START, 5, END, 9], (1, [9], True)),
        (OPEN, [3, END, 4, 4, 4], [5], (0, [5], True)),
        (OPEN, [3], [END, 9], (0, [9], True)),
        (ONE, [START], [END, START, 9], (0, [START, 9], True)),  # only one reasoning
        (LONG, [3], [7, 8, 9, 4, 7, 6, 7, 5, 3], (1, [3], True)),
        (LONG, [3], [7, 8, 4], (0, [7, 8, 4], True)),
        (LONG_OPEN, [3], [7, 8, 4, 7, 6, 7, 6, 7, 5, 3], (5, [3], True)),
        (LONG_OPEN, [3], [7, 6, 7, 5, 3], (0, [3], True)),
        (LONG, [7, 8, 9], [7, 6, 7], (3, [], False)),
    ],
)
def test_an_output(
    marks: ReasoningMarks, prompt: list[int], output: list[int], expected: tuple[int, list[int], bool]
) -> None:
    assert follow(marks, prompt, output) == expected


@pytest.mark.parametrize("marks", [ONE, OPEN])
def test_what_is_known_of_a_conversation_decides_instead_of_marks_in_its_texts(marks: ReasoningMarks) -> None:
    for prompt in ([START, 4], [3, END, 4, 4, 4], [3]):
        begun = Reasoning(marks, prompt, ReasoningStart.NONE)
        assert (begun.is_inside, begun.is_over) == (marks.begins_inside, False)
        assert Reasoning(marks, prompt, ReasoningStart.OPEN).is_inside
        assert Reasoning(marks, prompt, ReasoningStart.CLOSED).is_over
    assert Reasoning(marks, [START], 99).is_inside, "as before, for what a newer tokenizer may say"
    assert {each.value for each in ReasoningStart} == set(types_pb2.ReasoningStart.values())


@given(st.data())
def test_the_parts_in_which_tokens_come_do_not_matter(data: st.DataObject) -> None:
    marks = data.draw(st.sampled_from([ONE, OPEN, LONG, LONG_OPEN]))
    tokens = st.lists(st.sampled_from(sorted({*marks.start, *marks.end, 3})), max_size=12)
    prompt, output = data.draw(tokens), data.draw(tokens)
    reasoning, answer = Reasoning(marks, prompt), list[int]()
    left = output
    while left:
        size = data.draw(st.integers(1, len(left)))
        answer += reasoning.feed(left[:size])
        left = left[size:]
    assert (reasoning.num_tokens, answer, reasoning.is_over) == follow(marks, prompt, output)
    assert 0 <= reasoning.num_tokens <= len(output)


@given(st.sampled_from([ONE, OPEN, LONG, LONG_OPEN]), st.lists(st.integers(3, 9), max_size=9))
def test_the_end_mark_follows_from_any_reasoning(marks: ReasoningMarks, output: list[int]) -> None:
    """Forcing ``next_of_end`` ends the reasoning within as many tokens as the mark has."""
    reasoning = Reasoning(marks, [*marks.start, 3])
    answer = reasoning.feed(output)
    for _ in marks.end:
        if not reasoning.is_over:
            answer = reasoning.feed([reasoning.next_of_end])
    assert reasoning.is_over
    assert not answer or answer == output[-len(answer) :]


def test_the_format_is_the_templates_or_a_chosen_one() -> None:
    assert format_of_template("{{ content.split('</think>')[-1] }}") == "qwen3"
    assert format_of_template("{{ content }}") == ""
    assert format_of_template("[THINK]{{ reasoning }}[/THINK]") == "mistral"
    assert format_of_template("<seed:think>{{ reasoning }}</seed:think>") == "seed_oss"
    assert reasoning_format("auto", "qwen3") is FORMATS["qwen3"]
    assert reasoning_format("deepseek_r1", "qwen3") is FORMATS["deepseek_r1"]
    for parser, template in (("none", "qwen3"), ("auto", ""), ("auto", "of_the_future")):
        assert reasoning_format(parser, template) is None


def test_marks_are_the_tokens_of_the_texts() -> None:
    assert marks_of(FORMATS["qwen3"], lambda text: list(map(ord, text))) == ReasoningMarks(
        tuple(map(ord, "<think>")), tuple(map(ord, "</think>")), begins_inside=False
    )

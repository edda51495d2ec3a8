"""Reasoning is separated from the answer, whatever pieces the text arrives in."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenloom.request.reasoning import FORMATS
from tokenloom.services.gateway.formats.message_parts import Content, ReasoningText, TextPart
from tokenloom.services.gateway.formats.think import ThinkParser, opener


def said(parser: ThinkParser, pieces: Sequence[str]) -> tuple[str, str]:
    """Reasoning and content."""
    parts: list[TextPart] = []
    for piece in pieces:
        parts += parser.feed(piece)
    parts += parser.finish()
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return reasoning, "".join(part.text for part in parts if isinstance(part, Content))


@pytest.mark.parametrize(
    ("inside", "text", "expected"),
    [
        (False, "<think>\nHm, <b>.\n</think>\n\nYes.\n", ("Hm, <b>.", "Yes.\n")),
        (False, "<think>\n\n</think>\n\nYes.", ("", "Yes.")),
        (False, "Yes <think>no</think>", ("", "Yes <think>no</think>")),
        (False, " \n<thin", ("", " \n<thin")),
        (False, "", ("", "")),
        (False, "<think>cut of", ("cut of", "")),
        (True, "Hm.\n</think>\n\nYes.", ("Hm.", "Yes.")),
        (True, "<think>Hm.</think>Yes.", ("Hm.", "Yes.")),
        (True, "cut of </thi", ("cut of </thi", "")),
        (True, "</think>Yes.", ("", "Yes.")),
    ],
)
def test_examples(inside: bool, text: str, expected: tuple[str, str]) -> None:
    assert said(ThinkParser(inside=inside), [text]) == expected
    assert said(ThinkParser(inside=inside), list(text)) == expected


@given(
    inside=st.booleans(),
    pieces=st.lists(st.sampled_from(("<think>", "</think>", "<", "/think>", " ", "\n", "a")) | st.text(max_size=3)),
)
def test_pieces_do_not_matter(inside: bool, pieces: list[str]) -> None:
    text = "".join(pieces)
    whole = said(ThinkParser(inside=inside), [text])
    assert said(ThinkParser(inside=inside), pieces) == whole
    assert said(ThinkParser(inside=inside), list(text)) == whole


def test_names() -> None:
    assert said(opener(FORMATS["deepseek_r1"])(False), ["Hm.</think>Yes."]) == ("Hm.", "Yes.")
    assert said(opener(FORMATS["qwen3"])(True), ["Hm.</think>Yes."]) == ("Hm.", "Yes.")
    assert said(opener(FORMATS["qwen3"])(False), ["Yes."]) == ("", "Yes.")


def test_what_is_held_does_not_depend_on_the_pieces() -> None:
    whole, single = ThinkParser(inside=True), ThinkParser(inside=True)
    seen = "".join(part.text for part in whole.feed("1 < "))
    assert seen == "1 <"
    assert "".join(part.text for char in "1 < " for part in single.feed(char)) == seen


@pytest.mark.parametrize("name", [name for name, each in FORMATS.items() if not each.aside])
def test_each_format_has_its_marks(name: str) -> None:
    reasoning = FORMATS[name]
    text = f"{reasoning.start}\nHm. < [\n{reasoning.end}\n\nYes <{reasoning.end}"
    expected = "Hm. < [", f"Yes <{reasoning.end}"
    assert said(opener(reasoning)(False), [text]) == said(opener(reasoning)(False), list(text)) == expected

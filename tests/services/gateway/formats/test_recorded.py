"""Our parser reads what vLLM's parsers read, but for the differences that a list gives, each with who is right.

The texts, and what vLLM makes of each as a whole, in words and in characters, are in ``recorded/vllm.json``.
``python -m tests.services.gateway.formats.test_recorded`` prints the differences that the list does not give.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.formats.recorded.texts import FAMILIES, OURS, RECORDED
from tokenloom.request.reasoning import FORMATS as REASONING
from tokenloom.services.gateway.assistant.message_plans import (
    MessagePlan,
    ParsedMessage,
    calls_of,
    reasoning_of,
    text_of,
)
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.think import opener
from tokenloom.services.gateway.formats.tool_request import Tool

DIFFERENCES = Path(__file__).parent / "recorded" / "differences.json"
WAYS = ("whole", "words", "characters")
Difference = tuple[str, str, str]
"""Family, kind of text, and way in which vLLM was given it."""


@cache
def recorded() -> Mapping[str, Any]:
    return json.loads(RECORDED.read_text())  # type: ignore[no-any-return]


def ours(case: Mapping[str, Any], pieces: Sequence[str]) -> dict[str, Any]:
    """What our parser makes of a text in these pieces."""
    form, reasoning = FAMILIES[case["family"]]
    tools = [Tool(name, schema, {}) for name, schema in recorded()["tools"].items()]
    open_reasoning = None
    if reasoning and case["kind"].startswith("reasoning"):
        open_reasoning = opener(REASONING[OURS.get(reasoning, "qwen3")])
    plan = MessagePlan(open_tools=partial(open_parser, form, tools), open_reasoning=open_reasoning)
    message = ParsedMessage(plan, reasoning_is_open=False)
    content, thought, calls = "", "", list[list[str]]()
    for at, piece in enumerate(pieces):
        delta = message.feed(piece, ends=at == len(pieces) - 1)
        content, thought = content + text_of(delta), thought + reasoning_of(delta)
        for call in calls_of(delta):
            if call.name:
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return {"reasoning": thought, "content": content, "calls": calls}


def same(found: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two answers say the same: blanks at the ends of texts and within JSON are not compared."""
    if "error" in other:
        return False
    texts = [[answer[name].strip() for name in ("reasoning", "content")] for answer in (found, other)]
    calls = [[[name, _value(arguments)] for name, arguments in answer["calls"]] for answer in (found, other)]
    return texts[0] == texts[1] and calls[0] == calls[1]


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return "".join(arguments.split())  # cut off


def differences() -> Iterator[Difference]:
    for case in recorded()["cases"]:
        found = ours(case, [case["text"]])
        for way in WAYS:
            if not same(found, case.get(way, case["whole"])):
                yield case["family"], case["kind"], way


def listed() -> Iterator[Difference]:
    for cause in json.loads(DIFFERENCES.read_text()):
        for family, kinds in cause["where"].items():
            for kind, ways in kinds.items():
                yield from ((family, kind, way) for way in ways.split())


def test_what_was_recorded() -> None:
    assert len(recorded()["parsers"]) >= 20
    assert (recorded()["vllm"], len(recorded()["date"])) == ("0.33.0", 10)
    assert all(case["whole"] for case in recorded()["cases"])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_pieces_make_no_difference_for_ours(family: str) -> None:
    for case in recorded()["cases"]:
        if case["family"] == family:
            assert ours(case, list(case["text"])) == ours(case, [case["text"]]), case["kind"]


def test_ours_differs_from_vllms_only_where_the_list_says() -> None:
    found, known = set(differences()), list(listed())
    assert len(known) == len(set(known))
    assert sorted(found - set(known)) == []
    assert sorted(set(known) - found) == [], "these are equal now: take them out of differences.json"


def test_each_difference_has_a_cause_and_says_who_is_right() -> None:
    for cause in json.loads(DIFFERENCES.read_text()):
        assert cause["cause"].endswith(".")
        assert cause["right"] in ("ours", "vllm", "either")


def main() -> None:
    for difference in sorted(set(differences()) - set(listed())):
        print(*difference)


if __name__ == "__main__":
    main()

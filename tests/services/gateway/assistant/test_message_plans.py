"""The parts of an assistant's turn keep the order in which the model wrote them, however the text is cut."""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.plugin_packages import EXAMPLE_NAME, install, install_example
from tokenloom.request.reasoning import FORMATS as REASONING_FORMATS
from tokenloom.request.reasoning import ReasoningFormat
from tokenloom.request.tool_format import FORMATS, REQUIRED, ToolFormat, to_json
from tokenloom.services.gateway.assistant.message_plans import (
    CallDelta,
    MessageDelta,
    MessagePlan,
    MessagePlans,
    OutputReader,
    ParsedMessage,
    ReasoningDelta,
    TextDelta,
)
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.think import opener
from tokenloom.services.gateway.formats.tool_request import Tool, ToolChoice, ToolRequest
from tokenloom.services.gateway.records.generate_request import GenerateRequest
from tokenloom.services.gateway.tenants.tenant import NO_TENANT
from tokenloom.v1.tokenizer_pb2 import GetTokenizerInfoResponse
from tokenloom.v1.types_pb2 import SamplingParams

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEXT = f"<think>Hm.</think>I ask.{CALL}I wait.{CALL}Done."
THINK = opener(next(iter(REASONING_FORMATS.values())))
PLAN = MessagePlan(
    open_tools=lambda: open_parser(FORMATS["hermes"], []),
    new_call_id=lambda name, random: f"call of {name}",
    open_reasoning=THINK,
)
EXPECTED = [
    ("reasoning", "Hm."),
    ("text", "I ask."),
    ("call 0 get_weather", '{"city": "Paris"}'),
    ("text", "I wait."),
    ("call 1 get_weather", '{"city": "Paris"}'),
    ("text", "Done."),
]


def joined(deltas: list[MessageDelta]) -> list[tuple[str, str]]:
    """Each part with all that it grew by, in the order in which the parts began."""
    parts: list[tuple[str, str]] = []
    for part in (part for delta in deltas for part in delta):
        if isinstance(part, CallDelta):
            kind = f"call {part.index} {part.name}" if part.name else parts[-1][0]
            assert kind.startswith(f"call {part.index} "), "arguments belong to the call before them"
            more = part.arguments
        else:
            kind, more = "text" if isinstance(part, TextDelta) else "reasoning", part.text
        if parts and parts[-1][0] == kind:
            parts[-1] = (kind, parts[-1][1] + more)
        else:
            parts.append((kind, more))
    return parts


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 7, 11, 40, 90, len(TEXT)])
def test_the_order_does_not_depend_on_the_pieces(piece: int) -> None:
    turn = ParsedMessage(PLAN, reasoning_is_open=False)
    deltas = [turn.feed(TEXT[at : at + piece], ends=False) for at in range(0, len(TEXT), piece)]
    assert joined([*deltas, turn.feed("", ends=True)]) == EXPECTED


def test_what_one_piece_adds_is_one_part_for_each_kind_in_a_row() -> None:
    turn = ParsedMessage(PLAN, reasoning_is_open=False)
    turn.feed('<think>Hm.</think>I ask.<tool_call>\n{"name": "f", "arguments": {"a', ends=False)
    delta = turn.feed('": 1}}\n</tool_call>So', ends=True)
    assert delta == [CallDelta(0, "", "", '": 1}'), TextDelta("So")]


def test_reasoning_that_is_left_out_leaves_no_part() -> None:
    plan = MessagePlan(open_reasoning=THINK, include_reasoning=False)
    assert ParsedMessage(plan, reasoning_is_open=False).feed("<think>Hm.</think>Yes.", ends=True) == [TextDelta("Yes.")]
    plan = MessagePlan(open_reasoning=THINK)
    turn = ParsedMessage(plan, reasoning_is_open=False)
    assert turn.feed("<think>Hm.</think>Yes.", ends=True) == [ReasoningDelta("Hm."), TextDelta("Yes.")]


def test_a_required_call_that_is_cut_keeps_its_arguments() -> None:
    plan = MessagePlan(
        open_tools=lambda: open_parser(REQUIRED, [Tool("get_weather", {}, {})]), new_call_id=lambda name, random: "new"
    )
    turn = ParsedMessage(plan, reasoning_is_open=False)
    turn.feed('[{"name": "get_weather", "parameters": {"city"', ends=False)
    assert turn.feed(': "Pa', ends=True) == [CallDelta(0, "", "", ': "Pa')]


def test_without_a_plan_all_of_it_is_text() -> None:
    reader = OutputReader(None, reasoning_is_open=False, may_reason=False)
    assert reader.feed(CALL, ends=False) == [TextDelta(CALL)]
    assert reader.feed("", ends=True) == []


@pytest.mark.parametrize("choice", [ToolChoice.NONE, ToolChoice.AUTO])
def test_marks_around_an_answer_are_no_text(choice: ToolChoice) -> None:
    form = FORMATS["hermes"]
    plans = MessagePlans(replace(form, drops=("<|begin|>", "<|end|>")), REASONING_FORMATS["cohere_command"])
    request = GenerateRequest(prompts=["hi"], prompt_field="messages", sampling=SamplingParams(), tenant=NO_TENANT)
    plan, _ = plans.apply(ToolRequest([Tool("f", {}, {"function": {}})], choice), request, include_reasoning=True)
    text = "<|START_THINKING|>Hm.<|END_THINKING|><|begin|>Yes, <|no|>.<|end|>"
    for pieces in ([text], list(text)):
        reader = OutputReader(plan, reasoning_is_open=False, may_reason=True)
        deltas = [reader.feed(piece, ends=False) for piece in pieces] + [reader.feed("", ends=True)]
        assert joined(deltas) == [("reasoning", "Hm."), ("text", "Yes, <|no|>.")]


@pytest.mark.parametrize(
    ("derived", "found"),
    [
        (b"", FORMATS["hermes"]),  # of a tokenizer that derives nothing
        (b'{"syntax":"of a newer tokenizer"}', FORMATS["hermes"]),
        (b"not JSON", FORMATS["hermes"]),
        (to_json(FORMATS["glm45"]), FORMATS["glm45"]),
    ],
)
def test_a_description_that_cannot_be_read_counts_as_none(derived: bytes, found: ToolFormat) -> None:
    info = GetTokenizerInfoResponse(tool_call_parser="hermes", tool_format_json=derived)
    assert MessagePlans.choose("auto", "auto", info).tools == found


def test_formats_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install_example(tmp_path)
    tools, reasoning = f"{EXAMPLE_NAME}:square", f"{EXAMPLE_NAME}:aside"
    plans = MessagePlans.choose(tools, reasoning, GetTokenizerInfoResponse(), plugins=(EXAMPLE_NAME,))
    assert plans.tools is not None
    assert plans.tools.call == ("[call]", "[/call]")
    assert plans.reasoning == ReasoningFormat("<aside>", "</aside>", begins_inside=False)
    request = GenerateRequest(prompts=["hi"], prompt_field="messages", sampling=SamplingParams(), tenant=NO_TENANT)
    asked = ToolRequest([Tool("f", {}, {"function": {}})], ToolChoice.AUTO)
    plan, _ = plans.apply(asked, request, include_reasoning=True)
    reader = OutputReader(plan, reasoning_is_open=False, may_reason=True)
    text = '<aside>Hm.</aside>[call]{"name": "f", "arguments": {"a": 1}}[/call]'
    found = joined([reader.feed(text, ends=False), reader.feed("", ends=True)])
    assert found[0] == ("reasoning", "Hm.")
    assert "f" in str(found[1:])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("T = {'syntax': 'none'}\nR = 1", "is no format"),
        ("T = 1\nR = {}", "is no format"),
        ("T = {'call': 1}\nR = {'start': 'a', 'end': 1, 'begins_inside': True}", "is no format"),
    ],
)
def test_what_is_no_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme", raising=False)
    points = {"tokenloom.tool_formats": {"t": "acme:T"}, "tokenloom.reasoning_formats": {"r": "acme:R"}}
    install(tmp_path, "acme", points, source)
    for names in (("acme:t", "none"), ("none", "acme:r")):
        with pytest.raises(ValueError, match=reason):
            MessagePlans.choose(*names, GetTokenizerInfoResponse(), plugins=("acme",))

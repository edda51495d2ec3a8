"""Calls of every family: what its template writes is what the parser reads, whole, in pieces and cut off.

``python -m tests.services.gateway.formats.test_families --examples 100000`` tries as many cases of all properties.
"""

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.services.gateway.formats.test_tool_formats import parsed
from tests.services.tokenizer.families import FAMILIES, form_of, template_of
from tokenloom.request.tool_format import FORMATS, INDEX, ToolFormat
from tokenloom.services.gateway.assistant.message_plans import MessagePlan, ParsedMessage, calls_of, text_of
from tokenloom.services.gateway.formats.call_parser import open_parser
from tokenloom.services.gateway.formats.message_parts import CallArguments
from tokenloom.services.gateway.formats.strict_calls import strict_constraint
from tokenloom.services.gateway.formats.tool_request import Tool, read_tool_request
from tokenloom.services.tokenizer.chat_template import ChatTemplate
from tokenloom.services.tokenizer.tool_probe import CallProbe, derive, write_calls

EXAMPLES = 6
"""Cases of each property and family in the ordinary run."""
_TYPES = {str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number", dict: "object"}
_KEYS = ("city", "unit", "opts", "n_1", "x")
_ONE_CALL = ("llama3_1",)
Call = tuple[str, dict[str, Any]]


class Case(NamedTuple):
    """An output of a model, and what it says."""

    form: ToolFormat
    tools: list[Tool]
    before: str
    calls: list[Call]
    after: str
    text: str
    pieces: list[str]
    cut: int


def rendered(family: str, calls: Sequence[Call]) -> str:
    """The calls as the template writes them; without a template's word, as the description does."""
    if family == "kimi_k2":
        return write_calls(form_of(family), calls)
    if family == "gpt_oss":
        return "<|start|>assistant".join(
            f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps(arguments)}<|call|>"
            for name, arguments in calls
        )
    return CallProbe(template_of(family)).region(calls)


def is_clear(form: ToolFormat, value: Any) -> bool:
    """Whether a format without escapes can say this: a value holds nothing that ends it."""
    if isinstance(value, dict):
        return all(is_clear(form, each) for each in value.values())
    if isinstance(value, list):
        return all(is_clear(form, each) for each in value)
    if not isinstance(value, str):
        return True
    if form.syntax == "bare":
        mark = form.string_mark
        return mark not in value and not any(value.endswith(mark[:size]) for size in range(1, len(mark)))
    if form.syntax == "pairs":
        closing = re.escape(form.pair[2].strip())
        marks = [form.pair[0].strip(), form.after_arguments.strip(), form.call[1].strip(), form.section[1].strip()]
        follows = "|".join(re.escape(mark) for mark in marks if mark)
        return not re.search(rf"{closing}\s*({follows}|\Z)", value)
    return True


def values_of(form: ToolFormat) -> st.SearchStrategy[Any]:
    marks = [*form.marks, "</parameter>", "<", '"', "'", "\\", "\n", "\n\n", "{", "}", "[", "]", ")", ", ", "null", "5"]
    texts = st.lists(st.sampled_from(marks) | st.text(max_size=6), max_size=5).map("".join)
    numbers = st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | texts | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3),
        max_leaves=6,
    ).filter(partial(is_clear, form))


def tool_of(name: str, arguments: Mapping[str, Any]) -> Tool:
    properties = {key: {"type": _TYPES.get(type(value), "array")} for key, value in arguments.items()}
    return Tool(name, {"type": "object", "properties": properties}, {})


words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<[{>"), max_size=12)


@st.composite
def cases(draw: st.DrawFn, family: str) -> Case:
    form = form_of(family)
    names = draw(st.lists(st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True), min_size=1, max_size=3, unique=True))
    names = names[:1] if family in _ONE_CALL else names
    arguments = st.dictionaries(st.sampled_from(_KEYS), values_of(form), max_size=4)
    calls = [(name, draw(arguments)) for name in names]
    before, after = ("", "") if not form.is_marked else (draw(words), draw(words))
    if form.syntax == "messages":
        before = after = ""
    written = rendered(family, calls).rstrip()
    text = f"{before}{written}{after}"
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = draw(st.integers(0, len(text)))
    return Case(form, [tool_of(*call) for call in calls], before, calls, after, text, pieces, cut)


def read(case: Case, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    return parsed(open_parser(case.form, case.tools), pieces)


def check_calls(case: Case) -> None:
    """What is written is what is found, and no text around it is lost or added."""
    text, calls = read(case, [case.text])
    assert [(name, json.loads(arguments)) for name, arguments in calls] == case.calls
    assert text == case.before.rstrip() + (case.after if case.after.strip() else "")


def check_pieces(case: Case) -> None:
    """It does not matter in which pieces the output comes."""
    whole = read(case, [case.text])
    assert read(case, case.pieces) == whole
    assert read(case, list(case.text)) == whole


def check_cut(case: Case) -> None:
    """A call that is cut off yields what was complete, and nothing of it as text."""
    text, calls = read(case, [case.text[: case.cut]])
    assert read(case, list(case.text[: case.cut])) == (text, calls)
    assert [name for name, _ in calls] == [name for name, _ in case.calls[: len(calls)]]
    assert [json.loads(arguments) for _, arguments in calls[:-1]] == [each for _, each in case.calls[: len(calls)]][:-1]
    if len(case.before) <= case.cut <= len(case.text) - len(case.after) and case.form.is_marked and not calls:
        # Of the mark that begins a call, a part is no call yet.
        assert "".join(f"{case.before}{case.form.openings[0]}".split()).startswith("".join(text.split()))


def check_one_call(case: Case) -> None:
    """Without parallel calls the first one counts."""
    plan = MessagePlan(
        partial(open_parser, case.form, case.tools), new_call_id=lambda name, random: name, parallel_calls=False
    )
    message = ParsedMessage(plan, reasoning_is_open=False)
    deltas = [message.feed(piece, ends=False) for piece in case.pieces] + [message.feed("", ends=True)]
    found = [call for delta in deltas for call in calls_of(delta)]
    assert {call.index for call in found} == {0}
    assert json.loads("".join(call.arguments for call in found)) == case.calls[0][1]
    assert "".join(map(text_of, deltas)) == read(case, [case.text])[0]


CHECKS = (check_calls, check_pieces, check_cut, check_one_call)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(data=st.data())
def test_families(family: str, check: Any, data: st.DataObject) -> None:
    check(data.draw(cases(family)))


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "gpt_oss"])
def test_a_text_of_an_argument_comes_as_it_is_written(family: str) -> None:
    form, words = form_of(family), "some words, as they come; " * 20
    text = rendered(family, [("f", {"a": words})])
    parser = open_parser(form, [tool_of("f", {"a": words})])
    begin, end = text.index("some"), text.index("some") + len(words)
    behind = 0
    size = 0
    for at, char in enumerate(text):
        size += sum(len(part.text) for part in parser.feed(char) if isinstance(part, CallArguments))
        if begin <= at < end:
            behind = max(behind, at - begin - size)
    assert behind < 16


def test_a_family_is_added_by_its_template_alone() -> None:
    source = (
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}<new:call {{ c.function.name }}>"
        "{% for k, v in c.function.arguments.items() %}"
        "<new:arg {{ k }}>{{ v if v is string else v | tojson }}</new:arg>{% endfor %}"
        "</new:call>{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    template = ChatTemplate(source)
    form = derive(template)
    calls: list[Call] = [("f", {"a": "x\n", "b": [1, None]}), ("g", {})]
    text = CallProbe(template).region(calls)
    assert "<new:call f>" in text
    found = parsed(open_parser(form, [tool_of(*call) for call in calls]), list(f"So.\n{text} Done."))
    assert (found[0], [(name, json.loads(arguments)) for name, arguments in found[1]]) == ("So. Done.", calls)


OBJECT = """{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"""
KEYWORDS = (
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}"
)
PAIRS = "{% for k, v in c.function.arguments.items() %}<arg {{ k }}>{{ v }}</arg>{% endfor %}"
OWN = [
    ("", "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>", ""),
    ("", "<invoke {{ c.function.name }}>" + PAIRS + "</invoke>", ""),
    ("", "<call:{{ c.function.name }}(" + KEYWORDS + ")>", ""),
    ("Calling tools:\n[", OBJECT + "{{ ', ' if not loop.last }}", "]"),
    ("<|action|><|calls|>", "<call>" + OBJECT + "</call>", "<|end_calls|><|end_action|>"),
    ("", "Tool call: " + OBJECT + "\n", ""),
]
"""Before the calls, a call and after the calls, as templates of no family in the list write them."""


@pytest.mark.parametrize("form", OWN)
def test_calls_of_templates_with_unusual_marks(form: tuple[str, str, str]) -> None:
    before, call, after = form
    calls: list[Call] = [("f", {"a": 1}), ("g", {"b": 2})]
    template = ChatTemplate(
        "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% if m.tool_calls %}"
        f"{before}{{% for c in m.tool_calls %}}{call}{{% endfor %}}{after}"
        "{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    derived, tools = derive(template), [tool_of(*call) for call in calls]
    text = CallProbe(template).region(calls)
    for pieces in ([f"So.\n{text} Done."], list(f"So.\n{text} Done.")):
        words, found = parsed(open_parser(derived, tools), pieces)
        assert (words.split(), [(name, json.loads(each)) for name, each in found]) == (["So.", "Done."], calls)
    for words in ("I use the Tool", "You are Calling", "a < b"):
        assert parsed(open_parser(derived, tools), [words]) == (words, [])
    definitions = [
        {"type": "function", "function": {"name": tool.name, "parameters": tool.parameters, "strict": True}}
        for tool in tools
    ]
    assert strict_constraint(read_tool_request(definitions, "auto", True), derived) is not None


def test_strict_tools_have_no_grammar_where_calls_have_no_mark() -> None:
    assert not FORMATS["llama4_pythonic"].binds_arguments
    assert FORMATS["llama3_json"].binds_arguments


def test_ids_that_the_model_writes_are_those_of_the_calls() -> None:
    form = form_of("kimi_k2")
    assert INDEX in form.after_name
    text = write_calls(form, [("f", {}), ("g", {"a": 1})])
    plan = MessagePlan(partial(open_parser, form, []), new_call_id=lambda name, random: "new")
    delta = ParsedMessage(plan, reasoning_is_open=False).feed(text + text, ends=True)
    assert [call.call_id for call in calls_of(delta)] == ["functions.f:0", "functions.g:1", "new", "new"]


def _try(family: str, check: Callable[[Case], None], examples: int) -> None:
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases(family))
    def test(case: Case) -> None:
        check(case)

    test()


def main() -> None:
    """Try many cases, in equal parts for the families and properties."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    options = parser.parse_args()
    each = max(options.examples // (len(options.families) * len(CHECKS)), 1)
    for family in options.families:
        for check in CHECKS:
            _try(family, check, each)
        print(f"{family}: {each * len(CHECKS)} cases", flush=True)


if __name__ == "__main__":
    main()

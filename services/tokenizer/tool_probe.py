"""Derives from a chat template how the model writes tool calls and reasoning.

The template renders turns whose names, arguments and thoughts occur nowhere else. What stands around them, and what is
the same and what differs with other calls, gives the description. It is kept only if it writes the probes again.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from msgspec.structs import replace

from tokenloom.request.tool_format import ALNUM, FORMATS, ID, INDEX, KIND, NAME, Syntax, ToolFormat

from .chat_template import ChatTemplate, TemplateRefused, TemplateTooLong

_NAMES = ("zqname_a", "zqname_b", "zqname_c")
_KEYS = ("zqkey_a", "zqkey_b")
_VALUES = ("zqval_a", "zqval_b")
_ID, _LONG_ID = "zqid00001", "call_zqid0000000000000001"
_SAID, _THOUGHT = "zqsaid", "zqthought"
_ARGS = dict(zip(_KEYS, _VALUES, strict=True))
_MESSAGES = ("<|channel|>", "<|message|>", "<|start|>")
_OPTIONAL = ("<|python_tag|>", "<|python_start|>")
"""Marks that models write before calls that have none in their templates."""
_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
_CUT_MARK = re.compile(r"(<[^<>\s]*|\[[A-Z_]*)\Z")
_REST_OF_MARK = re.compile(r"\A[^<>\s\"]*>")

Call = tuple[str, Mapping[str, Any]]
_Message = Mapping[str, Any]


class NotDerived(ValueError):
    """Raised when a template writes calls in a way that no description fits. The message says what it does."""


@dataclass(frozen=True, slots=True)
class _Span:
    """Where the parts of a call stand in a text."""

    syntax: Syntax
    name: int
    after_name: int
    arguments: int
    end: int
    """After the arguments."""


def derive(template: ChatTemplate) -> ToolFormat:
    """Return how calls are written. Raises ``NotDerived``."""
    if all(mark in template.source for mark in _MESSAGES):
        return FORMATS["openai"]  # each call is a message with a header, next to those of other channels
    probe = CallProbe(template)
    one = probe.region([(_NAMES[0], _ARGS)])
    span = _span(one, _NAMES[0])
    form = _Shape(probe, one, span).form()
    optional = "" if form.is_marked else next((mark for mark in _OPTIONAL if mark in template.source), "")
    form = replace(form, call_id=probe.call_id(form), optional_open=optional, drops=probe.drops())
    _check_readable(form)
    probe.prove(form)
    return form


def _check_readable(form: ToolFormat) -> None:
    """Raise ``NotDerived`` for calls of which no parser knows where they begin."""
    before = form.section[0] + form.call[0] + ("" if form.syntax == "json" else form.before_name)
    if ID in before or INDEX in before:
        raise NotDerived("the number of a call stands before its name")
    if not (form.is_marked or form.is_list or form.syntax == "json" or form.before_name.strip()):
        raise NotDerived("nothing stands before the name of a call")


def derive_reasoning(template: ChatTemplate) -> tuple[str, str] | None:
    """Return what opens and closes the reasoning that a template writes; None if it writes none."""
    turn = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT, "thinking": _THOUGHT}
    for messages in ([_user(), turn], [_user(), turn, _user()]):
        try:
            text = template.render(messages, add_generation_prompt=False)
        except (TemplateRefused, TemplateTooLong):
            continue
        if 0 <= (at := text.find(_THOUGHT)) < (said := text.find(_SAID)):
            opening = _MARK.findall(text[:at])[-1:]
            closing = _MARK.findall(text[at:said])[:1]
            if not opening or not closing or closing[0] in text[said:]:
                return None  # the mark that ends the thoughts ends turns, too
            return opening[0], closing[0]
    return None


def write_calls(form: ToolFormat, calls: Sequence[Call]) -> str:
    """Return the text of calls in a format."""
    written = [_written(form, name, arguments, at) for at, (name, arguments) in enumerate(calls)]
    return f"{form.section[0]}{form.separator.join(written)}{form.section[1]}"


def _written(form: ToolFormat, name: str, arguments: Mapping[str, Any], at: int) -> str:
    def placed(text: str) -> str:
        return text.replace(ID, _ID).replace(INDEX, str(at))

    match form.syntax:
        case "pairs":
            body = "".join(_pair(form, key, value) for key, value in arguments.items())
        case "python":
            body = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        case "bare":
            body = ",".join(f"{key}:{_bare(value, form.string_mark)}" for key, value in arguments.items())
        case _:
            body = json.dumps(arguments, ensure_ascii=False)
    before, after, end = placed(form.before_name), placed(form.after_name), placed(form.after_arguments)
    return f"{form.call[0]}{before}{name}{after}{body}{end}{form.call[1]}"


def _pair(form: ToolFormat, key: str, value: Any) -> str:
    opening, between, closing = form.pair
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"{opening}{key}{between.replace(KIND, form.kinds[not isinstance(value, str)])}{written}{closing}"


def _bare(value: Any, mark: str) -> str:
    match value:
        case str():
            return f"{mark}{value}{mark}"
        case dict():
            return "{" + ",".join(f"{key}:{_bare(each, mark)}" for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(_bare(each, mark) for each in value) + "]"
    return json.dumps(value)


def _user() -> _Message:
    return {"role": "user", "content": "hi"}


def _turn(calls: Sequence[Call], call_id: str = _ID) -> _Message:
    called = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}
        for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": called}


_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": ""} for key in _KEYS},
            },
        },
    }
    for name in ("first", "second")
]


class CallProbe:
    """Renders turns, and finds what the assistant writes in them."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        marks = derive_reasoning(template) or template.reasoning_marks
        self._reasoning_end = marks[1]
        self._prompt = self._render([_user()], add_generation_prompt=True)
        self._said = self._render([_user(), {"role": "assistant", "content": _SAID}])

    def region(self, calls: Sequence[Call]) -> str:
        """Return what the assistant writes to make these calls."""
        text = self._render([_user(), _turn(calls)])
        start = len(_common_start(self._prompt, text))
        end = _common_end(self._said.rpartition(_SAID)[2], text[start:])
        region = text[start : len(text) - len(end)]
        # Some templates write an empty reasoning, or the end of one, before calls.
        return region.rpartition(self._reasoning_end)[2]

    def call_id(self, form: ToolFormat) -> str:
        """Return the form of the ids that the template accepts."""
        try:
            self._render([_user(), _turn([(_NAMES[0], _ARGS)], _LONG_ID)])
        except NotDerived:
            return ALNUM
        before_index, index, _ = form.after_name.partition(INDEX)
        return f"{form.before_name}{NAME}{before_index}{index}" if index else form.call_id

    def drops(self) -> tuple[str, ...]:
        """Return the marks that the assistant writes around its words."""
        before, _, after = self._said.rpartition(_SAID)
        start = len(_common_start(self._prompt, before))
        end = _common_end(after, self._render([_user(), _turn([(_NAMES[0], _ARGS)])]))
        marks = [*_MARK.findall(before[start:]), *_MARK.findall(after[: len(after) - len(end)])]
        reasoning = derive_reasoning(self._template) or ()
        ends = self._template.special_tokens.values()
        return tuple(mark for mark in marks if mark not in reasoning and mark not in ends)

    def prove(self, form: ToolFormat) -> None:
        """Raise ``NotDerived`` if the description does not write what the template does."""
        for calls in ([(name, _ARGS) for name in _NAMES], [(_NAMES[0], {}), (_NAMES[1], _ARGS)]):
            try:
                found = self.region(calls)
            except NotDerived:
                continue  # it takes no more than one call
            written = write_calls(form, calls)
            if "".join(found.split()).replace("'", '"') != "".join(written.split()).replace("'", '"'):
                raise NotDerived(f"the template writes {found!r:.200}, and its description {written!r:.200}")

    def _render(self, messages: Sequence[_Message], *, add_generation_prompt: bool = False) -> str:
        try:
            return self._template.render(messages, _TOOLS, add_generation_prompt=add_generation_prompt)
        except (TemplateRefused, TemplateTooLong) as error:
            raise NotDerived(f"the template refuses a turn: {error}") from None


class _Shape:
    """Takes the texts of a description from a call and from two."""

    def __init__(self, probe: CallProbe, one: str, span: _Span) -> None:
        self._probe = probe
        self._one = one
        self._span = span

    def form(self) -> ToolFormat:
        """Return the description without its ids."""
        span, one = self._span, self._one
        pair, kinds, arguments, end = ("", "", ""), ("", ""), span.arguments, span.end
        if span.syntax == "pairs":
            pair, arguments, end = self._pair()
            pair, kinds = self._with_kinds(pair)
        opening, separator, closing, section = self._around(one[: span.name], one[end:])
        section = section[0].lstrip(), section[1]
        call_open, before_name = _split_opening(opening, span.syntax)
        if not section[0]:
            separator += call_open[: len(call_open) - len(call_open.lstrip())]
            call_open = call_open.lstrip()
        if ID in before_name.replace(_ID, ID) and span.syntax != "json":
            raise NotDerived("the id of a call stands before its name")
        after_arguments, call_close = _split_closing(closing, span.syntax, has_opening=bool(call_open.strip()))
        return ToolFormat(
            span.syntax,
            section,
            (call_open, call_close),
            separator,
            before_name.replace(_ID, ID),
            self._after_name(one[span.after_name : arguments]),
            after_arguments.replace(_ID, ID),
            pair,
            kinds,
            _string_mark(one, span),
        )

    def _after_name(self, text: str) -> str:
        """Return what stands after a name, with the places of an id and of the number of the call."""
        if "0" in text:
            try:
                two = self._probe.region([(_NAMES[0], _ARGS), (_NAMES[1], _ARGS)])
            except NotDerived:
                return text.replace(_ID, ID)
            second = _span(two, _NAMES[1])
            if two[second.after_name : second.arguments] == text.replace("0", "1"):
                text = text.replace("0", INDEX)
        return text.replace(_ID, ID)

    def _around(self, before: str, after: str) -> tuple[str, str, str, tuple[str, str]]:
        """Return what stands before and after each call, between two, and around all of them."""
        try:
            two = self._probe.region([(_NAMES[0], _ARGS), (_NAMES[1], _ARGS)])
        except NotDerived:
            return before, "\n" if _MARK.search(before) else "; ", after, ("", "")
        first, second = _span(two, _NAMES[0]), _span(two, _NAMES[1])
        start = first.end + len(self._value_end(two, first))
        end = second.end + len(self._value_end(two, second))
        before, between, after = two[: first.name], two[start : second.name], two[end:]
        if re.search(r"\b0\b", before) and re.search(r"\b1\b", between):
            before, between = re.sub(r"\b0\b", INDEX, before), re.sub(r"\b1\b", INDEX, between)
        closing = _common_start(between, after)
        opening = _common_end(between[len(closing) :], before)
        separator = between[len(closing) : len(between) - len(opening)]
        return opening, separator, closing, (before[: len(before) - len(opening)], after[len(closing) :])

    def _value_end(self, text: str, span: _Span) -> str:
        """Return what follows the last value of pairs, before what follows the pairs."""
        return self._pair()[0][2] if span.syntax == "pairs" else ""

    def _pair(self) -> tuple[tuple[str, str, str], int, int]:
        """Return the texts around keys and values, and where the pairs begin and end."""
        one, span = self._one, self._span
        (first, second), (value, last) = map(one.index, _KEYS), map(one.index, _VALUES)
        between = one[first + len(_KEYS[0]) : value]
        middle = one[value + len(_VALUES[0]) : second]
        opening = _REST_OF_MARK.sub("", _common_end(one[span.after_name : first], middle), count=1)
        closing = middle[: len(middle) - len(opening)]
        if one[second + len(_KEYS[1]) : last] != between or not (opening.strip() and closing.strip()):
            raise NotDerived("the arguments are not written in one way")
        end = last + len(_VALUES[1])
        return (opening, between, closing), first - len(opening), end + len(closing)

    def _with_kinds(self, pair: tuple[str, str, str]) -> tuple[tuple[str, str, str], tuple[str, str]]:
        """Return the texts around keys and values, with the place for the kind of a value, and what stands there."""
        opening, between, closing = pair
        text = self._probe.region([(_NAMES[0], {_KEYS[0]: 731})])
        _, key, rest = text.partition(_KEYS[0])
        found, number, _ = rest.partition(f"731{closing}")
        if not (key and number):
            raise NotDerived("numbers are not written as texts are")
        if found == between:
            return pair, ("", "")
        start = len(_same(between, found))
        end = len(_same(between[start:][::-1], found[start:][::-1]))
        kinds = between[start : len(between) - end], found[start : len(found) - end]
        if not (start and end and all(kinds)):
            raise NotDerived("numbers are not written as texts are")
        return (opening, f"{between[:start]}{KIND}{between[len(between) - end :]}", closing), kinds


def _span(text: str, name: str) -> _Span:
    """Return where the parts of a call stand. Raises ``NotDerived``."""
    if (at := text.find(name)) < 0:
        raise NotDerived("the name of a call is not written")
    after = at + len(name)
    if (first := text.find(_KEYS[0], after)) < 0:
        raise NotDerived("the arguments of a call are not written")
    for opening in (each.start() for each in re.finditer(r"\{", text[after:first])):
        try:
            value, size = json.JSONDecoder().raw_decode(text[after + opening :])
        except ValueError:
            continue
        if value == _ARGS:
            is_object = text[:at].rstrip().endswith('": "')
            arguments = after + opening
            return _Span("json" if is_object else "named", at, after, arguments, arguments + size)
    last = text.find(_VALUES[1], first) + len(_VALUES[1])
    if last < len(_VALUES[1]):
        raise NotDerived("an argument of a call is not written")
    if text[after] == "(":
        return _Span("python", at, after, after + 1, text.index(")", last))
    if text[after] == "{":
        return _Span("bare", at, after, after + 1, text.index("}", last))
    return _Span("pairs", at, after, first, last)


def _string_mark(text: str, span: _Span) -> str:
    if span.syntax != "bare":
        return ""
    start = text.index(_KEYS[0]) + len(_KEYS[0])
    return text[start : text.index(_VALUES[0])].lstrip(": ")


def _split_opening(text: str, syntax: Syntax) -> tuple[str, str]:
    """Return the opening mark of a call, and what stands between it and the name."""
    if syntax == "json":
        at = text.find("{")
        return text[:at], text[at:]
    mark = _MARK.match(text.lstrip())
    if mark is None:
        return "", text
    end = len(text) - len(text.lstrip()) + mark.end()
    end += len(text[end:]) - len(text[end:].lstrip())
    return text[:end], text[end:]


def _split_closing(text: str, syntax: Syntax, *, has_opening: bool) -> tuple[str, str]:
    """Return what stands between the arguments and the closing mark of a call, and that mark."""
    if syntax == "json":
        found = re.match(r"[^{}]*\}+", text)
        end = found.end() if found else 0
        return text[:end], text[end:]
    if syntax in ("python", "bare"):
        return text[:1], text[1:]
    marks = list(_MARK.finditer(text))
    if not has_opening or not marks:
        return text, ""
    start = len(text[: marks[-1].start()].rstrip())
    return text[:start], text[start:]


def _same(one: str, other: str) -> str:
    return "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _common_start(one: str, other: str) -> str:
    """Return with what two texts begin, without a mark that is not whole."""
    same = _same(one, other)
    is_whole = len(same) in (len(one), len(other))
    return same if is_whole else _CUT_MARK.sub("", same)


def _common_end(one: str, other: str) -> str:
    """Return with what two texts end, without a mark that is not whole."""
    same = _same(one[::-1], other[::-1])[::-1]
    if len(same) in (len(one), len(other)):
        return same
    found = _REST_OF_MARK.match(same)
    return same[found.end() :] if found else same

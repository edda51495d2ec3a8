"""Constrains calls: those that a client forces, and the arguments of strict tools that the model may call.

Where the model's format of calls is known, the grammar is a structural tag of the texts and schemas of which a call
consists in that format.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenloom.request.json_schema import moved, of_objects
from tokenloom.request.output_constraints import (
    MAX_FORMATS,
    check_structured_outputs,
    json_schema_constraint,
    relax,
    structural_tag_constraint,
)
from tokenloom.request.schema_pattern import whole_pattern
from tokenloom.request.tool_format import ID, INDEX, KIND, REQUIRED, ToolFormat
from tokenloom.v1 import types_pb2

from .message_parts import CallArguments, CallBegin, ToolPart
from .pairs import ValueKind, texts_of, value_kind
from .tool_request import Tool, ToolChoice, ToolRequest


@dataclass(frozen=True, slots=True)
class Forced:
    """How calls are made that a client demands."""

    constraint: types_pb2.StructuredOutputs
    """On the output."""
    lost: Sequence[str]
    """The names of the keywords of schemas that it leaves out."""
    form: ToolFormat | None
    """How the calls are written; None: the output is the arguments of the named one."""


def force(request: ToolRequest, form: ToolFormat | None) -> Forced:
    """Return how a request's calls are forced. ``form``: how the model writes calls; None: unknown.

    Raises ``InvalidArgument`` for schemas beyond the limits.
    """
    lost: list[str] = []
    if form is not None and form.demands_calls:
        # As the model was trained to write calls, and as its template writes them again in the next turn.
        tools = request.tools if request.named is None else [request.named]
        tags = [call_tag(form, tool.name, _arguments(tool, lost)) for tool in tools]
        wanted = forced_format(form, tags, parallel=request.parallel and request.named is None)
        if num_formats(wanted) <= MAX_FORMATS:
            constraint = structural_tag_constraint({"type": "structural_tag", "format": wanted}, "tools")
            check_structured_outputs(constraint, "tools")
            return Forced(constraint, lost, form)
        lost = []
    if request.named is not None:
        # JSON is a form that each model knows.
        constraint = json_schema_constraint(_arguments(request.named, lost), "tools")
    else:
        schema = _list_schema(request.tools, lost, parallel=request.parallel)
        constraint = json_schema_constraint(schema, "tools")
    check_structured_outputs(constraint, "tools")
    return Forced(constraint, lost, None if request.named is not None else REQUIRED)


def _arguments(tool: Tool, lost: list[str]) -> dict[str, Any]:
    """Return the schema of a call's arguments, which are always an object. Adds to ``lost``; raises
    ``InvalidArgument``."""
    constraint = json_schema_constraint(tool.parameters, tool.where)
    lost += relax(constraint, tool.where, strict=_is_strict(tool))
    return of_objects(json.loads(constraint.json))


class NamedCall:
    """Reads an output that consists of the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._begin: list[ToolPart] = [CallBegin(name)]

    @property
    def is_within_call(self) -> bool:
        return not self._begin  # a constraint ends the output with the call

    def feed(self, text: str) -> list[ToolPart]:
        parts, self._begin = self._begin, []
        return [*parts, CallArguments(text)]

    def finish(self) -> list[ToolPart]:
        return self._begin


def _list_schema(tools: Sequence[Tool], lost: list[str], *, parallel: bool) -> Mapping[str, Any]:
    """Return the schema of an array of calls. Each tool's schema keeps its own ``$ref``s, now below ``$defs``."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, "parameters": {"$ref": f"#/$defs/tool{index}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    defs = {f"tool{at}": moved(_arguments(tool, lost), f"#/$defs/tool{at}") for at, tool in enumerate(tools)}
    return {**schema, "$defs": defs}


_ANY_OBJECT = {"type": "object"}


def has_strict(tools: Sequence[Tool]) -> bool:
    """Return whether a tool's arguments must follow its schema."""
    return any(map(_is_strict, tools))


def strict_constraint(request: ToolRequest, form: ToolFormat) -> types_pb2.StructuredOutputs | None:
    """Return the constraint of a choice that is left to the model; None if no tool is strict, or if the tools are
    beyond the limit of formats.

    The text is free until a call begins. The call then names one of the tools, and its arguments follow the schema of
    that tool if it is strict. Raises ``InvalidArgument`` for schemas beyond the limits.
    """
    # The whole output cannot be a schema, because the model decides whether to call. Without a strict tool nothing is
    # compiled.
    if request.choice is not ToolChoice.AUTO or not has_strict(request.tools):
        return None
    schemas = [_arguments(tool, []) if _is_strict(tool) else _ANY_OBJECT for tool in request.tools]
    tags = [call_tag(form, tool.name, schema) for tool, schema in zip(request.tools, schemas, strict=True)]
    if form.section[0] and form.is_marked:
        tags = [section_tag(form, tags, parallel=request.parallel)]
    for tag in tags:
        tag["begin"] = tag["begin"].lstrip()
    trigger = form.openings[0] if form.is_marked else form.before_name  # a mark may go on with the name of the tool
    calls: dict[str, Any] = {"type": "triggered_tags", "triggers": [trigger], "tags": tags}
    if not request.parallel:
        calls["stop_after_first"] = True
    if num_formats(calls) > MAX_FORMATS:
        return None
    constraint = structural_tag_constraint({"type": "structural_tag", "format": calls}, "tools")
    check_structured_outputs(constraint, "tools")
    return constraint


def _is_strict(tool: Tool) -> bool:
    return tool.definition["function"].get("strict") is True


Tag = dict[str, Any]
_MAX_FIRSTS = 6
"""Arguments of which any may be the first one written, where none must be there; those behind them follow others."""
_PLACES = {ID: "[A-Za-z0-9]{9}", INDEX: "[0-9]{1,4}"}
_ANY_KEY, _ANY_KEYWORD = "[A-Za-z0-9_.-]{1,64}", "[A-Za-z_][A-Za-z0-9_]{0,63}="
_MAX_LENGTH = 1_000_000
"""Longer limits of a text bind no output."""
_ANY_TEXT: Tag = {"type": "any_text"}
_ANY_VALUE: Tag = {"type": "json_schema", "json_schema": {}}
_PLACE = re.compile(f"({ID}|{INDEX})")


def section_tag(form: ToolFormat, tags: Sequence[Tag], *, parallel: bool) -> Tag:
    """Return the tag of a section that holds calls."""
    calls: Tag = {"type": "tags_with_separator", "tags": list(tags), "separator": form.separator, "at_least_one": True}
    if not parallel:
        calls["stop_after_first"] = True
    return {"type": "tag", "begin": form.section[0], "content": calls, "end": form.section[1]}


def forced_format(form: ToolFormat, tags: Sequence[Tag], *, parallel: bool) -> Tag:
    """Return the format of an output that consists of calls."""
    calls = section_tag(form, tags, parallel=parallel)
    calls["begin"] = calls["begin"].lstrip()
    return calls if calls["begin"] or calls["end"] else dict(calls["content"])


def num_formats(value: Any) -> int:
    """Return how many formats a tag consists of."""
    if isinstance(value, list):
        return sum(map(num_formats, value))
    if not isinstance(value, dict):
        return 0
    return 1 + sum(num_formats(part) for name, part in value.items() if name != "json_schema")


def call_tag(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> Tag:
    """Return the tag of a call of one tool, whose arguments follow a schema, an object's."""
    begin, *places = _PLACE.split(f"{form.call[0]}{form.before_name}{name}{form.after_name}")
    content = [_place(text) for text in places if text]
    match form.syntax:
        case "pairs":
            content += _pairs(form, schema)
        case "python":
            content += _keywords(schema)
        case _:
            content.append({"type": "json_schema", "json_schema": schema})
    *places, end = _PLACE.split(f"{form.after_arguments}{form.call[1]}")
    content += [_place(text) for text in places if text]
    if not content:
        content, end = [_place(end)], ""
    return {"type": "tag", "begin": begin, "content": _sequence(content), "end": end}


def _place(text: str) -> Tag:
    if text in _PLACES:
        return {"type": "regex", "pattern": _PLACES[text]}
    return {"type": "const_string", "value": text}


def _pairs(form: ToolFormat, schema: Mapping[str, Any]) -> list[Tag]:
    """Return the arguments one after the other, in the order of the schema; those that may be left out are optional."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [] if schema.get("additionalProperties") is False else [_any_pairs(form)]
    required = set(schema.get("required") or ())
    pairs = []
    for key, value in properties.items():
        pair = _pair(form, schema, key, value)
        pairs.append(pair if key in required else {"type": "optional", "content": pair})
    return pairs


def _pair(form: ToolFormat, schema: Mapping[str, Any], key: str, value: Any) -> Tag:
    kind = value_kind(schema, key)
    if kind not in (ValueKind.TEXT, ValueKind.TEXT_OR_NULL):
        return _written(form, key, _bound(schema, value), is_text=False)
    closing = form.pair[2].strip()
    ways = [_words(found, closing) for found in texts_of(schema, key)]
    words = _ANY_TEXT if _ANY_TEXT in ways or not ways else _either(ways)
    text = _written(form, key, words, is_text=True)
    if kind is ValueKind.TEXT:
        return text
    return _either([text, _written(form, key, _place("null"), is_text=False)])


def _written(form: ToolFormat, key: str, value: Tag, *, is_text: bool) -> Tag:
    between = form.pair[1].replace(KIND, form.kinds[not is_text])
    return {"type": "tag", "begin": f"{form.pair[0]}{key}{between}", "content": value, "end": form.pair[2]}


def _words(found: Mapping[str, Any], closing: str) -> Tag:
    """Return the texts that a schema allows. ``closing``: ends them."""
    values = [found["const"]] if "const" in found else found.get("enum")
    values = values if isinstance(values, list) else []
    choices = [_place(value) for value in values if isinstance(value, str) and value]
    if not choices:
        if not (patterns := [*_patterns(found)]):
            return _ANY_TEXT
        # Besides a pattern, "also" and "excludes" are our own: xgrammar, which does not have them, binds the first one.
        return {"type": "regex", "pattern": patterns[0], "also": patterns[1:], "excludes": [closing]}
    return {"type": "optional", "content": _either(choices)} if "" in values else _either(choices)


def _patterns(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield expressions that the texts of a schema match."""
    if isinstance(pattern := found.get("pattern"), str):
        yield whole_pattern(pattern)
    least, most = (found.get(name) for name in ("minLength", "maxLength"))
    if _is_count(least) or _is_count(most):
        yield f"(?s:.){{{least if _is_count(least) else 0},{most if _is_count(most) else ''}}}"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_LENGTH


def _any_pairs(form: ToolFormat) -> Tag:
    """Return arguments of which the schema says nothing."""
    ways = [_sequence([_place(form.pair[1].replace(KIND, form.kinds[0])), _ANY_TEXT])]
    if form.kinds[0] != form.kinds[1]:
        ways.append(_sequence([_place(form.pair[1].replace(KIND, form.kinds[1])), _ANY_VALUE]))
    pair = _sequence([{"type": "regex", "pattern": _ANY_KEY}, _either(ways)])
    tag = {"type": "tag", "begin": form.pair[0], "content": pair, "end": form.pair[2]}
    return {"type": "star", "content": tag}


def _keywords(schema: Mapping[str, Any]) -> list[Tag]:
    """Return the arguments of a call of Python: first those that must be there, so that each other one has a comma."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [] if schema.get("additionalProperties") is False else [_any_keywords()]
    required = [key for key in properties if key in set(schema.get("required") or ())]
    optional = [key for key in properties if key not in required]
    if not required:
        return [{"type": "optional", "content": _from_first(schema, optional)}]
    return [*_listed(schema, required), *_more(schema, optional)]


def _any_keywords() -> Tag:
    """Return arguments of which the schema says nothing."""
    words = [_place(word) for word in ("True", "False", "None")]
    keyword = _sequence([{"type": "regex", "pattern": _ANY_KEYWORD}, _either([*words, _ANY_VALUE])])
    more = {"type": "star", "content": _sequence([_place(", "), keyword])}
    return {"type": "optional", "content": _sequence([keyword, more])}


def _from_first(schema: Mapping[str, Any], keys: Sequence[str]) -> Tag:
    """Return some of the arguments in their order: with each of the first ones as the one without a comma."""
    firsts = range(min(len(keys), _MAX_FIRSTS))
    ways = [_sequence([*_listed(schema, [keys[at]]), *_more(schema, keys[at + 1 :])]) for at in firsts]
    return _either(ways)


def _listed(schema: Mapping[str, Any], keys: Sequence[str]) -> list[Tag]:
    found: list[Tag] = []
    for key in keys:
        found += [_place(f"{', ' if found else ''}{key}="), _literal(schema, key)]
    return found


def _more(schema: Mapping[str, Any], keys: Sequence[str]) -> list[Tag]:
    pairs = [_sequence([_place(f", {key}="), _literal(schema, key)]) for key in keys]
    return [{"type": "optional", "content": pair} for pair in pairs]


def _literal(schema: Mapping[str, Any], key: str) -> Tag:
    value = schema["properties"][key]
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "boolean":
        return {"type": "or", "elements": [_place("True"), _place("False")]}
    return _place("None") if kind == "null" else _bound(schema, value)


def _sequence(elements: list[Tag]) -> Tag:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": elements}


def _either(ways: list[Tag]) -> Tag:
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _bound(schema: Mapping[str, Any], value: Any) -> Tag:
    bound = dict(value) if isinstance(value, Mapping) else {}
    if "$defs" in schema:
        bound["$defs"] = schema["$defs"]
    return {"type": "json_schema", "json_schema": bound}

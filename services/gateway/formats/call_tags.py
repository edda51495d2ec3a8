"""Writes calls as grammars: structural tags of the texts and schemas of which the format of a model says that a call
consists."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenloom.request.tool_format import ID, INDEX, KIND, ToolFormat

from .pairs import ValueKind, value_kind

Tag = dict[str, Any]
_PLACES = {ID: "[A-Za-z0-9]{9}", INDEX: "[0-9]{1,4}"}
_PLACE = re.compile(f"({ID}|{INDEX})")


def section_tag(form: ToolFormat, tags: Sequence[Tag], *, parallel: bool) -> Tag:
    """Return the tag of a section that holds calls."""
    calls: Tag = {"type": "tags_with_separator", "tags": list(tags), "separator": form.separator, "at_least_one": True}
    if not parallel:
        calls["stop_after_first"] = True
    return {"type": "tag", "begin": form.section[0], "content": calls, "end": form.section[1]}


def call_tag(form: ToolFormat, name: str, schema: Mapping[str, Any]) -> Tag:
    """Return the tag of a call of one tool, whose arguments follow a schema, an object's."""
    begin, *places = _PLACE.split(f"{form.call[0]}{form.before_name}{name}{form.after_name}")
    content = [_place(text) for text in places if text]
    match form.syntax:
        case "pairs":
            content += _pairs(form, schema)
        case _:
            content.append({"type": "json_schema", "json_schema": schema})
    *places, end = _PLACE.split(f"{form.after_arguments}{form.call[1]}")
    content += [_place(text) for text in places if text]
    if not content:
        content, end = [_place(end)], ""
    inner = content[0] if len(content) == 1 else {"type": "sequence", "elements": content}
    return {"type": "tag", "begin": begin, "content": inner, "end": end}


def _place(text: str) -> Tag:
    if text in _PLACES:
        return {"type": "regex", "pattern": _PLACES[text]}
    return {"type": "const_string", "value": text}


def _pairs(form: ToolFormat, schema: Mapping[str, Any]) -> list[Tag]:
    """Return the arguments one after the other, in the order of the schema; those that may be left out are optional."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return [] if schema.get("additionalProperties") is False else [{"type": "any_text"}]
    required = set(schema.get("required") or ())
    pairs = []
    for key, value in properties.items():
        kind = form.kinds[value_kind(schema, key) is not ValueKind.TEXT]
        pair = {
            "type": "tag",
            "begin": f"{form.pair[0]}{key}{form.pair[1].replace(KIND, kind)}",
            "content": _value(schema, key, value),
            "end": form.pair[2],
        }
        pairs.append(pair if key in required else {"type": "optional", "content": pair})
    return pairs


def _value(schema: Mapping[str, Any], key: str, value: Any) -> Tag:
    if value_kind(schema, key) is ValueKind.TEXT:
        if isinstance(choices := value.get("enum"), list):
            return {"type": "or", "elements": [{"type": "const_string", "value": choice} for choice in choices]}
        return {"type": "any_text"}
    bound = dict(value) if isinstance(value, Mapping) else {}
    if "$defs" in schema:
        bound["$defs"] = schema["$defs"]
    return {"type": "json_schema", "json_schema": bound}

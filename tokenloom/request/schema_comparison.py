"""Compares schemas of one JSON schema document, and follows the references between them."""

import json
import re
from collections.abc import Mapping
from typing import Any

TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
_INDEX = re.compile("[0-9]{1,6}")
_MAX_COMPARED = 64
"""Branches of one ``oneOf`` that are compared, each with each."""
_MAX_COMPARISONS = 8192
"""Comparisons of two schemas of one document, those of their properties included: a few tens of milliseconds."""
_MAX_LEVELS = 8
"""Properties within properties that are compared: references may lead back to where they stand."""


def resolved(root: Any, ref: str) -> Any:
    """Return what a reference within a document names, such as ``#/$defs/City``; None if there is nothing."""
    if ref == "#":
        return root
    if not ref.startswith("#/"):
        return None
    found = root
    for name in ref[2:].split("/"):
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


class Comparison:
    """Finds out whether schemas of one document exclude each other, as far as their types and constants show."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MAX_COMPARISONS
        self._values: dict[int, frozenset[str] | None] = {}  # by the schema's identity; the root holds it

    def are_disjoint(self, branches: list[Any]) -> bool:
        """Return whether no document fits two of these schemas, as far as is known."""
        if len(branches) > _MAX_COMPARED:
            return False
        shown = [_followed(self._root, branch) for branch in branches]
        values = [self._values_of(each) if isinstance(each, dict) else None for each in shown]
        known = [each for each in values if each is not None]
        if len(known) == len(shown):
            return len(frozenset().union(*known)) == sum(map(len, known))
        return all(self._differ(one, other, 0) for at, one in enumerate(shown) for other in shown[:at])

    def _differ(self, one: Any, other: Any, level: int) -> bool:
        self._left -= 1
        if not isinstance(one, dict) or not isinstance(other, dict):
            return one is False or other is False
        if self._left < 0 or level > _MAX_LEVELS:
            return False
        values = [self._values_of(each) for each in (one, other)]
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        kinds = [_kinds(each, held) for each, held in zip((one, other), values, strict=True)]
        if kinds[0].isdisjoint(kinds[1]):
            return True
        return kinds[0] & kinds[1] == {"object"} and self._objects_differ(one, other, level)

    def _objects_differ(self, one: dict[str, Any], other: dict[str, Any], level: int) -> bool:
        named: list[Mapping[str, Any]] = [_properties(each) for each in (one, other)]
        required = [_required(each) for each in (one, other)]
        closed = [
            each.get("additionalProperties") is False and "patternProperties" not in each for each in (one, other)
        ]
        if (closed[0] and required[1] - named[0].keys()) or (closed[1] and required[0] - named[1].keys()):
            return True
        for name in required[0] & required[1] & named[0].keys() & named[1].keys():
            mine, others = (_followed(self._root, properties[name]) for properties in named)
            if self._differ(mine, others, level + 1):
                return True
        return False

    def _values_of(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        """Return the only values of a schema, written as JSON; None if there are others."""
        key = id(schema)
        if key not in self._values:
            self._values[key] = _values(schema)
        return self._values[key]


def _followed(root: Any, schema: Any) -> Any:
    """Return a schema, or what it refers to."""
    for _ in range(8):  # chains of references are short, and may be circles
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        target = resolved(root, ref) if isinstance(ref, str) else None
        if target is None:
            return schema
        schema = target
    return schema


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def _values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    if "const" in schema:
        return frozenset((json.dumps(schema["const"], sort_keys=True),))
    values = schema.get("enum")
    return frozenset(json.dumps(value, sort_keys=True) for value in values) if isinstance(values, list) else None


def _kinds(schema: Mapping[str, Any], values: frozenset[str] | None) -> set[str]:
    """Return the types of a schema's values; integers are numbers. ``values``: the only ones; None: unknown."""
    if values is not None:
        return {_kind(json.loads(value)) for value in values}
    kinds = schema.get("type")
    named = kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else TYPES
    return {"number" if kind == "integer" else str(kind) for kind in named}


def _kind(value: object) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")

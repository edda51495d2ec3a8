"""Arguments of requests for plugins: a JSON schema describes one object, whose properties are their names.

A keyword that is not checked is refused when a plugin is loaded, so that no rule is written that has no effect.
Nothing here imports other code of ours: worker, engine's front and gateway check by the same rules.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

MAX_ARGUMENT_BYTES = 1 << 16
"""Limits the arguments of a request, as JSON."""
_MOST_NESTED = 8
_MOST_NESTED_VALUES = 32
_LEAST_INT, _LARGEST_INT = -(2**63), 2**64 - 1
_SURROGATE = re.compile("[\ud800-\udfff]")

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: type(value) is int or (type(value) is float and value.is_integer()),
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}
_BOUNDS: Mapping[str, tuple[str, Callable[[Any, Any], bool], str]] = {
    "minimum": ("number", lambda value, bound: value >= bound, "at least {}"),
    "maximum": ("number", lambda value, bound: value <= bound, "at most {}"),
    "exclusiveMinimum": ("number", lambda value, bound: value > bound, "above {}"),
    "exclusiveMaximum": ("number", lambda value, bound: value < bound, "below {}"),
    "minLength": ("string", lambda value, bound: len(value) >= bound, "a text of at least {} characters"),
    "maxLength": ("string", lambda value, bound: len(value) <= bound, "a text of at most {} characters"),
    "minItems": ("array", lambda value, bound: len(value) >= bound, "a list of at least {} items"),
    "maxItems": ("array", lambda value, bound: len(value) <= bound, "a list of at most {} items"),
}
"""Keywords that bound a value: what they apply to, the check, and the value in words."""


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value)


_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (lambda value: isinstance(value, str) or (_are_names(value) and bool(value)), "a name or names"),
    "enum": (lambda value: isinstance(value, (list, tuple)) and bool(value), "a list of values"),
    "properties": (lambda value: isinstance(value, Mapping), "an object"),
    "required": (_are_names, "a list of names"),
    **{
        name: (_TYPES["number"], "a number")
        if kind == "number"
        else (lambda value: type(value) is int and value >= 0, "a whole number")
        for name, (kind, _, _) in _BOUNDS.items()
    },
}
"""What the values of keywords must be: the check, and the same in words."""
_WORDS = frozenset({"title", "description", "default", "examples", "$schema"})
_KEYWORDS = frozenset({"type", "enum", "properties", "required", "additionalProperties", "items", *_BOUNDS, *_WORDS})


def check_schema(schema: object) -> str:
    """Return the schema of a plugin's arguments as JSON. Raises ``ValueError`` for one that cannot be enforced."""
    if not isinstance(schema, Mapping) or not isinstance(schema.get("properties"), Mapping) or not schema["properties"]:
        raise ValueError("the schema of the arguments must be an object with properties, the names of the arguments")
    if schema.get("type", "object") != "object":
        raise ValueError(f"the schema of the arguments has the type {schema['type']!r}; it must be object")
    _check_keywords(schema, "", _MOST_NESTED)
    if unknown := [name for name in schema.get("required", ()) if name not in schema["properties"]]:
        raise ValueError(f"the schema of the arguments requires {unknown[0]!r}, which is none of its properties")
    return json.dumps(schema, sort_keys=True, allow_nan=False)


def check_apart(schemas: Mapping[str, str]) -> None:
    """Raise ``ValueError`` if two plugins declare one argument. ``schemas``: by ``PACKAGE:NAME``."""
    owner: dict[str, str] = {}
    for named, schema in schemas.items():
        for name in _read_schema(schema)["properties"]:
            if name in owner:
                raise ValueError(f"the plugins {owner[name]} and {named} both declare the argument {name}; name one")
            owner[name] = named


def argument_names(schema: str) -> frozenset[str]:
    """Return the names of the arguments that a schema declares."""
    return frozenset(_read_schema(schema)["properties"])


def own_arguments(arguments: Mapping[str, Any], schema: str) -> dict[str, Any]:
    """Return those of a request's arguments that a schema declares."""
    declared = _read_schema(schema)["properties"]
    return {name: value for name, value in arguments.items() if name in declared}


def problem_of(text: str, schemas: Sequence[str]) -> str:
    """Return what is wrong with the arguments of a request, as JSON; empty: nothing.

    Each must be declared by one of the ``schemas``, and obey it. A schema of which no argument is given asks nothing.
    """
    try:
        arguments = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(arguments, dict):
        return "it must be an object of names and values"
    if problem := _problem_of_parts(arguments):
        return problem
    declared = frozenset().union(*map(argument_names, schemas))
    for name in arguments:
        if name not in declared:
            known = ", ".join(sorted(declared)) or "none"
            return f"no plugin of the engines reads {name!r:.64}; they read: {known}"
    for schema in schemas:
        own = own_arguments(arguments, schema)
        if own and (problem := _problem(own, _read_schema(schema), "")):
            return problem
    return ""


def _refuse_constant(constant: str) -> None:
    raise ValueError(constant)  # NaN and infinities, which Python reads though JSON has none


def _problem_of_parts(arguments: dict[str, Any]) -> str:
    """Return why arguments cannot be sent to a core, whose messages have numbers of 64 bits and valid UTF-8."""
    level: list[Any] = [arguments]
    for _ in range(_MOST_NESTED_VALUES):
        for part in level:
            if isinstance(part, str) and not part.isascii() and _SURROGATE.search(part):
                return "a text holds half of a surrogate pair"
            if type(part) is int and not _LEAST_INT <= part <= _LARGEST_INT:
                return "a whole number has more than 64 bits"
            if type(part) is float and not math.isfinite(part):
                return "a number is too large"  # as 1e400, which Python reads as infinity
        lists = [part for part in level if isinstance(part, list)]
        objects = [part for part in level if isinstance(part, dict)]
        level = [*chain.from_iterable(lists), *chain.from_iterable(chain(part, part.values()) for part in objects)]
        if not level:
            return ""
    return f"it is nested more than {_MOST_NESTED_VALUES} deep"


@lru_cache(maxsize=64)
def _read_schema(schema: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(schema)
    return parsed


def _check_keywords(schema: object, where: str, depth: int) -> None:
    if not isinstance(schema, Mapping):
        raise ValueError(f"the schema of {where or 'the arguments'} must be an object, not {schema!r:.40}")
    if not depth:
        raise ValueError(f"the schema of {where} is nested more than {_MOST_NESTED} deep")
    if unknown := sorted(map(str, schema.keys() - _KEYWORDS)):
        known = ", ".join(sorted(_KEYWORDS - _WORDS))
        raise ValueError(f"the schema of {where or 'the arguments'} has {unknown[0]}; checked are {known}")
    for keyword, (is_right, words) in _VALUES.items():
        if keyword in schema and not is_right(schema[keyword]):
            value = f"{schema[keyword]!r:.40}"
            raise ValueError(f"the schema of {where or 'the arguments'} must have as {keyword} {words}, not {value}")
    if wrong := [kind for kind in _kinds(schema) if kind not in _TYPES]:
        raise ValueError(f"the schema of {where} has the type {wrong[0]!r}; the types are {', '.join(_TYPES)}")
    if not isinstance(schema.get("additionalProperties", False), bool):
        raise ValueError(f"the schema of {where or 'the arguments'} must have additionalProperties true or false")
    for name, part in schema.get("properties", {}).items():
        _check_keywords(part, f"{where}.{name}".lstrip("."), depth - 1)
    if "items" in schema:
        _check_keywords(schema["items"], f"{where}[]", depth - 1)


def _kinds(schema: Mapping[str, Any]) -> Iterable[str]:
    kinds = schema.get("type", ())
    return (kinds,) if isinstance(kinds, str) else kinds


def _problem(value: Any, schema: Mapping[str, Any], where: str) -> str:
    """Return why a value does not obey a schema; empty: it does."""
    kinds = tuple(_kinds(schema))
    if kinds and not any(_TYPES[kind](value) for kind in kinds):
        return f"{where} must be of the type {' or '.join(kinds)}, not {json.dumps(value):.60}".lstrip()
    if "enum" in schema and not any(value == each and type(value) is type(each) for each in schema["enum"]):
        return f"{where} must be one of {json.dumps(schema['enum']):.200}, not {json.dumps(value):.60}"
    for keyword, (kind, obeys, words) in _BOUNDS.items():
        if keyword in schema and _TYPES[kind](value) and not obeys(value, schema[keyword]):
            return f"{where} must be {words.format(schema[keyword])}"
    if isinstance(value, list) and "items" in schema:
        parts = ((f"{where}[{index}]", item, schema["items"]) for index, item in enumerate(value))
        return next((found for at, item, rule in parts if (found := _problem(item, rule, at))), "")
    return _problem_of_members(value, schema, where) if isinstance(value, dict) else ""


def _problem_of_members(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> str:
    properties = schema.get("properties", {})
    if missing := [name for name in schema.get("required", ()) if name not in value]:
        return f"{where} needs {missing[0]}".lstrip()
    for name, part in value.items():
        at = f"{where}.{name}" if where else name
        if name not in properties:
            if schema.get("additionalProperties", True) is False:
                return f"{at} is unknown"
        elif found := _problem(part, properties[name], at):
            return found
    return ""

"""JSON schemas as they are compiled: an object holds what its schema names."""

import json
from collections.abc import Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")
_COMBINING = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")


def close_objects(source: str) -> str:
    """The schema with ``additionalProperties: false`` where an object's properties are named and no word is said of
    others, as vLLM's default backend has it: a model would fill an open object until its tokens end.

    A schema that combines parts (``allOf``, ``not``, ``properties`` beside ``anyOf``) stays as it is: to close one part
    would forbid what another names. Raises ``ValueError`` for what is no JSON.
    """
    schema = json.loads(source)
    parts = list(_parts(schema))
    if any(map(_combines, parts)):
        return source
    for part in parts:
        if _names_all(part):
            part["additionalProperties"] = False
    return json.dumps(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and those within it; what only looks like one, in a ``const`` or an ``enum``, is none."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name in _MAPS:
        if isinstance(schemas := schema.get(name), dict):
            for each in schemas.values():
                yield from _parts(each)
    for name in _LISTS:
        if isinstance(schemas := schema.get(name), list):
            for each in schemas:
                yield from _parts(each)
    for name in _SINGLE:
        yield from _parts(schema.get(name))


def _combines(part: dict[str, Any]) -> bool:
    return any(name in part for name in _COMBINING) or (
        "properties" in part and any(name in part for name in _ALTERNATIVES)
    )


def _names_all(part: dict[str, Any]) -> bool:
    """Whether an object can be made of the properties that are named; what is no schema is left to the compiler."""
    named, required, least = part.get("properties"), part.get("required", []), part.get("minProperties", 0)
    if not isinstance(named, dict) or "additionalProperties" in part or "patternProperties" in part:
        return False
    if not isinstance(required, list) or not isinstance(least, int):
        return False
    return all(isinstance(name, str) and name in named for name in required) and least <= len(named)

"""Prepares JSON schemas for compiling: an object holds only the properties that its schema names."""

import json
from collections.abc import Iterator
from typing import Any

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "contains", "propertyNames")
_COMBINING = ("allOf", "not", "if", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")
_ALTERNATIVES = ("anyOf", "oneOf", "$ref")


def close_objects(source: str) -> str:
    """Return the schema with ``additionalProperties: false`` in each object that names properties and does not mention
    others, as vLLM's default backend does: a model would fill an open object until its tokens end.

    A schema that combines parts (``allOf``, ``not``, ``properties`` together with ``anyOf``) is returned unchanged:
    closing one part would forbid what another one names. Raises ``ValueError`` if the source is not JSON.
    """
    schema = json.loads(source)
    parts = list(_parts(schema))
    if any(map(_combines, parts)):
        return source
    for part in parts:
        # pydantic and most tools leave additionalProperties out. llguidance alone then allows any property, and a small
        # model fills an open object until its tokens end.
        if _names_all(part):
            part["additionalProperties"] = False
    return json.dumps(schema)


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and those within it, except values of ``const`` or ``enum`` that only look like a schema."""
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
    """Return whether the named properties suffice for an object; False if the part is malformed."""
    named, required, least = part.get("properties"), part.get("required", []), part.get("minProperties", 0)
    if not isinstance(named, dict) or "additionalProperties" in part or "patternProperties" in part:
        return False
    if not isinstance(required, list) or not isinstance(least, int):
        return False
    return all(isinstance(name, str) and name in named for name in required) and least <= len(named)

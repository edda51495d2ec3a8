"""Fits JSON schemas to what the grammars of the engines can express, and finds their parts.

A keyword that a grammar cannot express is left out, so that the schema admits more documents and never fewer. All
schemas that remain stand where more is more: ``not`` and ``if`` are left out whole, and ``oneOf`` becomes ``anyOf``.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any
from urllib.parse import urldefrag, urljoin

from .schema_comparison import TYPES, Comparison, resolved
from .schema_pattern import portable_pattern

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalItems", "additionalProperties")
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"})
"""The formats that a grammar enforces. Any other one is an annotation, as JSON Schema says."""
_LEFT_OUT: Mapping[str, Callable[[Any], bool]] = {
    "uniqueItems": lambda value: value is False,
    "contains": lambda value: False,
    "not": lambda value: value is False,
    "dependentRequired": lambda value: not value,
    "dependentSchemas": lambda value: not value,
    "dependencies": lambda value: not value,
    "propertyNames": lambda value: value in (True, {}, {"type": "string"}),
    "unevaluatedProperties": lambda value: value in (True, {}),
    "unevaluatedItems": lambda value: value in (True, {}),
    "$dynamicRef": lambda value: False,
    "$recursiveRef": lambda value: False,
}
"""The keywords that no grammar expresses, and whether a value of one has no effect."""
_BESIDE = ("minContains", "maxContains", "then", "else")
"""Keywords that mean nothing without another one, which is left out."""
_NAMING = ("if", "dependentSchemas", "dependencies")
"""Keywords that may name more properties of an object."""
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_MAX_BOUND, _MIN_STEP = 1e18, 1e-9
_MAX_BASES = 8
"""Addresses of schemas from which a reference is tried: trying each from each would be quadratic."""
_MAX_FOLLOWED = 128
"""References that are followed, and written out, to find the objects that a schema admits."""
_APPLICATORS = ("allOf", "anyOf", "oneOf", "$ref", "if", "dependentSchemas", "prefixItems", "items", "contains")


@dataclass(frozen=True, slots=True)
class LostKeyword:
    """A keyword of a schema that no longer binds the output."""

    keyword: str
    where: str
    """JSON pointer of the schema that holds it, such as ``#/properties/tags``."""


def fitted(source: str) -> tuple[str, list[LostKeyword]]:
    """Return the source of a JSON schema as the engines can enforce it, and the keywords that this leaves out.

    The source is returned as it is when nothing has to change. Its size and depth must have been checked.
    """
    schema = json.loads(source)
    before = json.dumps(schema)
    lost = fit(schema)
    after = json.dumps(schema)
    return (source if after == before else after), lost


def fit(schema: Any) -> list[LostKeyword]:
    """Fit a schema in place, as :func:`fitted`."""
    fitting = _Fitting(schema)
    fitting.walk_all()
    return fitting.lost


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[Any, str | int, str]]:
    """Yield the holder, the key in it and the path below ``schema`` of each schema right within it; what ``const``,
    ``enum``, ``default`` and ``examples`` hold are values and not schemas."""
    for name in _MAPS:
        if isinstance(held := schema.get(name), dict):
            yield from ((held, key, f"{name}/{_escaped(key)}") for key in list(held))
    for name in _LISTS:
        if isinstance(held := schema.get(name), list):
            yield from ((held, index, f"{name}/{index}") for index in range(len(held)))
    for name in _SINGLE:
        if isinstance(schema.get(name), dict):
            yield schema, name, name


class _Fitting:
    """Walks over the schemas of one root.

    Attributes:
        lost: The keywords that were left out.
    """

    def __init__(self, root: Any) -> None:
        self.lost: list[LostKeyword] = []
        self._root = root
        self._seen: set[int] = set()
        self._references: list[tuple[dict[str, Any], str]] = []
        self._referred: list[tuple[Any, str]] = [(root, "#")]  # a chain of references may be longer than the stack
        self._unions: list[tuple[dict[str, Any], str]] = []
        self._comparison = Comparison(root)
        self._ids = set(_ids(root, ""))

    def walk_all(self) -> None:
        """Fit all schemas that the root holds or refers to."""
        while self._referred:
            self._walk(*self._referred.pop())
        for schema, where in self._unions:  # last: branches are compared as they remain
            self._join_one_of(schema, where)
        self._mend_references()

    def _walk(self, schema: Any, where: str) -> None:
        if not isinstance(schema, dict) or id(schema) in self._seen:
            return
        self._seen.add(id(schema))
        self._fit_value(schema, where)
        self._fit_properties(schema, where)
        self._leave_out(schema, where)
        self._fit_reference(schema, where)
        for holder, key, path in subschemas(schema):
            child = holder[key]
            if isinstance(child, dict) and child.get("not", False) in ({}, True):
                holder[key] = False  # as zod writes a value that cannot be
            else:
                self._walk(child, f"{where}/{path}")
        if "oneOf" in schema:
            self._unions.append((schema, where))

    def _mend_references(self) -> None:
        """Follow what references name to where it stands now; leave out those that name nothing."""
        for schema, where in self._references:
            ref = schema["$ref"]
            if resolved(self._root, ref) is None:
                moved = ref.replace("/oneOf/", "/anyOf/")
                if resolved(self._root, moved) is not None:
                    schema["$ref"] = moved
                else:
                    del schema["$ref"]
                    self._lose("$ref", where)

    def _lose(self, keyword: str, where: str) -> None:
        self.lost.append(LostKeyword(keyword, where))

    def _fit_value(self, schema: dict[str, Any], where: str) -> None:
        kinds = schema.get("type")
        if kinds is not None and not TYPES.issuperset(map(str, kinds if isinstance(kinds, list) else [kinds])):
            del schema["type"]
            self._lose("type", where)
        if "format" in schema and (not isinstance(schema["format"], str) or schema["format"] not in _FORMATS):
            del schema["format"]
        self._fit_numbers(schema, where)
        if isinstance(pattern := schema.get("pattern"), str):
            portable = portable_pattern(pattern)
            if portable is None:
                del schema["pattern"]
            else:
                schema["pattern"] = portable.text
            if portable is None or not portable.is_exact:
                self._lose("pattern", where)
        if not str(schema.get("$schema", "http://json-schema.org/")).partition("://")[2].startswith("json-schema.org/"):
            del schema["$schema"]

    def _fit_numbers(self, schema: dict[str, Any], where: str) -> None:
        """Leave out bounds and steps of which no expression of digits is made."""
        for name in _BOUNDS:
            if abs(_number(schema.get(name))) >= _MAX_BOUND:
                del schema[name]
                self._lose(name, where)
        if 0 < _number(schema.get("multipleOf")) < _MIN_STEP:
            del schema["multipleOf"]
            self._lose("multipleOf", where)

    def _fit_properties(self, schema: dict[str, Any], where: str) -> None:
        """Leave out the properties whose names no grammar finds; others may then have any value."""
        if not isinstance(patterns := schema.get("patternProperties"), dict):
            return
        kept = {}
        for pattern, value in patterns.items():
            portable = portable_pattern(pattern)
            if portable is not None and portable.is_exact:
                kept[portable.text] = value
                continue
            # A wider expression would bind properties that the schema leaves free.
            self._lose("patternProperties", where)
            schema["additionalProperties"] = True
        schema["patternProperties"] = kept
        if not kept:
            del schema["patternProperties"]

    def _leave_out(self, schema: dict[str, Any], where: str) -> None:
        if "unevaluatedProperties" in schema and not any(name in schema for name in _APPLICATORS):
            schema.setdefault("additionalProperties", schema.pop("unevaluatedProperties"))
        binds = "if" in schema and ("then" in schema or "else" in schema)
        if binds:
            self._lose("if", where)
        names_more = binds or any(schema.get(name) for name in _NAMING[1:])
        schema.pop("if", None)
        for name in _BESIDE:
            schema.pop(name, None)
        for name, has_no_effect in _LEFT_OUT.items():
            if name in schema and not has_no_effect(schema.pop(name)):
                self._lose(name, where)
        # An object is closed when it does not mention other properties, and those of a condition would be lost.
        if names_more and "properties" in schema:
            schema.setdefault("additionalProperties", True)

    def _fit_reference(self, schema: dict[str, Any], where: str) -> None:
        """Leave out a reference to another document; go to what one to this document names."""
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return
        if ref.startswith("#/") or ref == "#":
            self._references.append((schema, where))
            self._referred.append((resolved(self._root, ref), ref))
        elif not ref.startswith("#") and not self._is_known(ref):
            del schema["$ref"]
            self._lose("$ref", where)

    def _is_known(self, ref: str) -> bool:
        bases = islice(self._ids, _MAX_BASES)
        return bool(self._ids) and any(_joined(base, ref) in self._ids for base in ("", *bases))

    def _join_one_of(self, schema: dict[str, Any], where: str) -> None:
        """Write ``oneOf`` as ``anyOf``, which is the same if no two branches admit the same document."""
        if not isinstance(branches := schema["oneOf"], list) or not isinstance(schema.get("allOf", []), list):
            return  # malformed, which the engine's compiler reports
        if not self._comparison.are_disjoint(branches):
            self._lose("oneOf", where)
        del schema["oneOf"]
        if "anyOf" in schema:
            schema.setdefault("allOf", []).append({"anyOf": branches})
        else:
            schema["anyOf"] = branches


def of_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema for the objects among the documents of a schema that was fitted; for any object if there are
    none. Where a schema refers to very many others, any object is admitted."""
    return _of_objects(schema, schema, frozenset(), count(1)) or {"type": "object"}


def _of_objects(
    root: dict[str, Any], schema: Any, refs: frozenset[str], followed: Iterator[int]
) -> dict[str, Any] | None:
    """Return the schema of the objects; None if there are none. ``refs``: what was followed to get here; ``followed``:
    counts what was followed at all."""
    if not isinstance(schema, dict):
        return {"type": "object"} if schema is True else None
    kinds = schema.get("type")
    if kinds == "object":
        return schema
    if kinds is not None and (isinstance(kinds, str) or "object" not in kinds):
        return None
    if not isinstance(schema.get("const", {}), dict):
        return None
    found: dict[str, Any] = {**schema, "type": "object"}
    if isinstance(values := found.get("enum"), list):
        found["enum"] = [value for value in values if isinstance(value, dict)]
        if not found["enum"]:
            return None
    if isinstance(ref := found.get("$ref"), str) and (target := resolved(root, ref)) is not None:
        # Each reference is written out, and two to each next schema would double it: 1 KB had no end.
        ends = ref in refs or next(followed) > _MAX_FOLLOWED
        shown = {"type": "object"} if ends else _of_objects(root, target, refs | {ref}, followed)
        if shown is None:
            return None
        if shown is not target:  # a copy: others refer to the original, which need not be an object there
            del found["$ref"]
            if found.keys() & shown.keys() <= {"type", "title", "description", "$defs", "definitions"}:
                found = shown | found  # flat, so that objects are closed as everywhere else
            else:
                found["allOf"] = [*found.get("allOf", ()), shown]
    if isinstance(parts := found.get("allOf"), list) and any(
        _of_objects(root, part, refs, followed) is None for part in parts
    ):
        return None
    if isinstance(branches := found.get("anyOf"), list):
        found["anyOf"] = [
            each for branch in branches if (each := _of_objects(root, branch, refs, followed)) is not None
        ]
        return found if found["anyOf"] else None
    return found


def moved(schema: dict[str, Any], to: str) -> dict[str, Any]:
    """Return a schema that was fitted with its references to its own parts moved to ``to``, such as ``#/$defs/tool0``,
    where it will stand within another one. It changes ``schema``."""
    own = urldefrag(str(schema.pop("$id", ""))).url
    schema.pop("$schema", None)
    seen: set[int] = set()
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(ref := part.get("$ref"), str):
            ref = ref.removeprefix(own) if own and ref.startswith(f"{own}#") else ref
            waiting.append(resolved(schema, ref))
            part["$ref"] = to + ref[1:] if ref == "#" or ref.startswith("#/") else ref
        waiting += [holder[key] for holder, key, _ in subschemas(part)]
    return schema


def _number(value: object) -> int | float:
    """Return a number; 0 for anything else."""
    return value if isinstance(value, int | float) else 0


def _ids(schema: Any, base: str) -> Iterator[str]:
    """Yield the addresses that schemas of a document give themselves."""
    if isinstance(schema, dict):
        if isinstance(own := schema.get("$id"), str):
            base = _joined(base, own)
            yield base
        schema = list(schema.values())
    if isinstance(schema, list):
        for part in schema:
            yield from _ids(part, base)


def _joined(base: str, address: str) -> str:
    """Return an address without its fragment, as seen from another one; as it is if it is malformed."""
    try:
        return urldefrag(urljoin(base, address)).url
    except ValueError:
        return address


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")

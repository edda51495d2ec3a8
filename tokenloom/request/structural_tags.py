"""Checks structural tags: constraints that apply to parts of a text, such as the arguments of a tool call.

The form is xgrammar's, ``{"type": "structural_tag", "format": {…}}``, or the older one with ``structures`` and
``triggers``, which has the same meaning as a format of type ``triggered_tags``. Only the shape is checked here; the
engine's compiler finds out whether schemas and expressions are valid and which formats its backend supports.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from .errors import InvalidArgument

MAX_DEPTH = 32
"""Limits how deep the objects and arrays of a tag are nested, schemas included."""
MAX_FORMATS = 512
"""Limits the formats of one tag, nested ones included."""
_TEXTS = {"const_string": "value", "grammar": "grammar", "regex": "pattern"}
_WITH_CONTENT = ("tag", "optional", "plus", "star", "repeat")
_WITH_ELEMENTS = ("sequence", "or")
_WITH_TAGS = ("triggered_tags", "tags_with_separator", "token_triggered_tags")
FORMATS = (
    *_TEXTS,
    *_WITH_CONTENT,
    *_WITH_ELEMENTS,
    *_WITH_TAGS,
    *("json_schema", "qwen_xml_parameter", "any_text", "any_tokens", "token", "exclude_token"),
    *("dispatch", "token_dispatch"),
)
"""The types of formats that xgrammar knows."""


def check_structural_tag(source: str, field: str) -> None:
    """Check the shape and the limits of a tag. Raises ``InvalidArgument`` naming ``field``."""
    found = _read(source, field)
    num_formats = sum(1 for _ in _checked(found, field))
    if num_formats > MAX_FORMATS:
        raise InvalidArgument(f"{field}: a structural_tag may have at most {MAX_FORMATS} formats", field)


def current_form(source: str) -> str:
    """Return a tag that was checked with a ``format``, whichever form it has."""
    return json.dumps({"type": "structural_tag", "format": _read(source, "structural_tag")})


def schemas(value: object) -> Iterator[Any]:
    """Yield the JSON schemas of a tag that was checked."""
    if isinstance(value, dict):
        if isinstance(schema := value.get("json_schema"), dict):
            yield schema
            value = {name: part for name, part in value.items() if name != "json_schema"}
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from schemas(part)


def _read(source: str, field: str) -> Any:
    """Return the tag's format. The size of the source is limited, so decoding it takes little time."""
    try:
        tag = json.loads(source)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidArgument(f"{field}: structural_tag is not JSON: {error}", field) from None
    if not has_depth(tag, MAX_DEPTH):
        raise _too_deep(field)
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidArgument(f'{field}: a structural_tag must be an object of type "structural_tag"', field)
    # The older form is turned into the newer one, so that both backends have one meaning to compile: llguidance knows
    # only the older form, in a way of its own, and vLLM's backend for it refuses the newer one.
    if ("format" in tag) == ("structures" in tag):
        raise InvalidArgument(f"{field}: a structural_tag must have either format, or structures and triggers", field)
    return tag["format"] if "format" in tag else _triggered_tags(tag, field)


def _triggered_tags(tag: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return the format that means the same as ``structures`` and ``triggers``."""
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise InvalidArgument(f"{field}: structures must be a list of objects with begin, schema and end", field)
    tags = []
    for each in structures:
        content = {"type": "json_schema", "json_schema": each.get("schema")}
        tags.append({"type": "tag", "begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


def _checked(found: object, field: str, *, is_tag: bool = False) -> Iterator[None]:
    """Check a format and those within it; yield once for each."""
    yield
    if not isinstance(found, dict):
        raise InvalidArgument(f"{field}: a format of a structural_tag must be an object with a type", field)
    kind = found.get("type", "tag" if is_tag else None)
    if kind not in FORMATS or (is_tag and kind != "tag"):
        expected = "tag" if is_tag else f"one of {', '.join(FORMATS)}"
        raise InvalidArgument(f"{field}: the type of a format must be {expected}, not {kind!r:.64}", field)
    if kind in _TEXTS:
        _check_text(found, kind, _TEXTS[kind], field)
    elif kind in ("json_schema", "qwen_xml_parameter"):
        if not isinstance(found.get("json_schema"), dict | bool):
            raise InvalidArgument(f"{field}: the schema of a structural_tag must be an object", field)
    elif kind in _WITH_ELEMENTS:
        for element in _list_of(found, kind, "elements", field):
            yield from _checked(element, field)
    elif kind in _WITH_TAGS:
        if kind == "triggered_tags":
            _check_triggers(found, field)
        for tag in _list_of(found, kind, "tags", field):
            yield from _checked(tag, field, is_tag=True)
    elif kind in _WITH_CONTENT:
        if kind == "tag":
            _check_ends(found, field)
        yield from _checked(found.get("content"), field)


def _check_text(found: Mapping[str, Any], kind: str, name: str, field: str) -> None:
    if not isinstance(found.get(name), str) or not found[name]:
        raise InvalidArgument(f"{field}: {name} of the format {kind} must be a text that is not empty", field)


def _check_ends(tag: Mapping[str, Any], field: str) -> None:
    """A begin or end may also be an object: a format that names a token."""
    end = tag.get("end")
    ends = end if isinstance(end, list) and end else [end]
    if not isinstance(tag.get("begin"), str | dict) or not all(isinstance(each, str | dict) for each in ends):
        raise InvalidArgument(f"{field}: begin and end of a tag must be texts", field)


def _check_triggers(found: Mapping[str, Any], field: str) -> None:
    triggers = found.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(each, str) and each for each in triggers):
        raise InvalidArgument(f"{field}: triggers must be a list of texts that are not empty", field)
    known, lengths = set(triggers), set(map(len, triggers))  # few lengths: comparing every pair would be quadratic
    for tag in _list_of(found, "triggered_tags", "tags", field):
        begin = tag.get("begin") if isinstance(tag, dict) else None
        if not isinstance(begin, str) or known.isdisjoint(begin[:length] for length in lengths):
            raise InvalidArgument(f"{field}: begin of each tag must start with one of the triggers", field)


def _list_of(found: Mapping[str, Any], kind: str, name: str, field: str) -> Sequence[Any]:
    items = found.get(name)
    if not isinstance(items, list) or not items:
        raise InvalidArgument(f"{field}: the format {kind} must have at least one of {name}", field)
    return items


def has_depth(value: object, most: int) -> bool:
    """Return whether the objects and arrays of a JSON value are nested at most ``most`` levels deep."""
    if not isinstance(value, dict | list):
        return True
    return most > 0 and all(
        has_depth(part, most - 1) for part in (value.values() if isinstance(value, dict) else value)
    )


def _too_deep(field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: structural_tag is nested more than {MAX_DEPTH} levels deep", field)

"""Converts constraints on the output (``structured_outputs``, ``bad_words``) to the wire and checks their limits.

The limits bound the cost of compilation; only the engine's compiler finds out whether a constraint is valid.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .json_schema import LostKeyword, fit, fitted
from .sampling_params import StructuredOutputsParams

FIELD = "structured_outputs"
MAX_SOURCE_BYTES = 32 << 10
"""Limits a schema, a regular expression, a grammar, and all choices together."""
MAX_DEPTH = 32
"""Limits how deep the objects and arrays of a schema or a structural tag are nested."""
MAX_ENUM = 1000
"""Limits the values of one ``enum``, and the choices."""
MAX_PATTERN_BYTES = 1024
"""Limits ``whitespace_pattern``."""
OPTIONS = ("whitespace_pattern", "disable_any_whitespace")
"""Members that choose the blanks of a constraint."""
KINDS = tuple(name for name in StructuredOutputsParams.__struct_fields__ if name not in OPTIONS)

_WITH_BLANKS = ("json", "json_object")
_IGNORED = ("disable_additional_properties", "disable_fallback")
"""Other members of vLLM's ``structured_outputs``, accepted when they have no effect."""


def narrow_structured_outputs(value: object, field: str = FIELD) -> types_pb2.StructuredOutputs:
    """Convert vLLM's form, such as ``{"json": …}``, with one kind set. Raises ``InvalidArgument`` naming ``field``."""
    if isinstance(value, StructuredOutputsParams):
        value = structs.asdict(value)
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{field} must be an object with one of {', '.join(KINDS)}", field)
    asked = {name: part for name, part in value.items() if part is not None and part is not False}
    options = {name: asked.pop(name) for name in OPTIONS if name in asked}
    for name in asked:
        if name in _IGNORED:
            raise InvalidArgument(f"{field}: {name} is not supported", field)
        if name not in KINDS:
            raise InvalidArgument(f"{field}: {name!r:.64} is unknown; expected one of {', '.join(KINDS)}", field)
    if len(asked) != 1:
        raise InvalidArgument(f"{field} must have exactly one of {', '.join(KINDS)}, not {len(asked)}", field)
    ((kind, part),) = asked.items()
    constraint = _constraint(kind, part, field)
    _set_options(constraint, options, field)
    return constraint


def _constraint(kind: str, part: object, field: str) -> types_pb2.StructuredOutputs:
    if kind == "json":
        return json_schema_constraint(part, field)
    if kind == "structural_tag":
        return structural_tag_constraint(part, field)
    if kind == "choice":
        return types_pb2.StructuredOutputs(choice=_choices(part, field))
    if kind == "json_object" and part is not True:
        raise InvalidArgument(f"{field}: json_object must be true or false", field)
    wire: dict[str, Any] = {kind: part if kind == "json_object" else _text(part, kind, field)}
    return types_pb2.StructuredOutputs(**wire)


def _set_options(constraint: types_pb2.StructuredOutputs, options: Mapping[str, object], field: str) -> None:
    if "whitespace_pattern" in options:
        constraint.whitespace_pattern = _text(options["whitespace_pattern"], "whitespace_pattern", field)
    if "disable_any_whitespace" in options:
        if options["disable_any_whitespace"] is not True:
            raise InvalidArgument(f"{field}: disable_any_whitespace must be true or false", field)
        constraint.disable_any_whitespace = True


def json_schema_constraint(schema: object, field: str = FIELD) -> types_pb2.StructuredOutputs:
    """Return the constraint of a JSON schema, an object or its source. Raises ``InvalidArgument``."""
    return types_pb2.StructuredOutputs(json=_text(_source(schema, "the schema", field), "json", field))


def structural_tag_constraint(tag: object, field: str = FIELD) -> types_pb2.StructuredOutputs:
    """Return the constraint of a structural tag, an object or its source. Raises ``InvalidArgument``."""
    source = _text(_source(tag, "structural_tag", field), "structural_tag", field)
    return types_pb2.StructuredOutputs(structural_tag=source)


def _source(value: object, what: str, field: str) -> object:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except RecursionError:
        raise _too_deep(what, field) from None
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{field}: {what} is not JSON: {error}", field) from None


def relax(constraint: types_pb2.StructuredOutputs, field: str = FIELD, *, strict: bool = False) -> tuple[str, ...]:
    """Fit the JSON schemas of a constraint to what a grammar can express, after checking the constraint's limits.

    Args:
        field: The client's name of the constraint.
        strict: Refuse a schema that would not be enforced as it is.

    Returns the keywords that do not bind the output, each below ``field``. Raises ``InvalidArgument`` naming it.
    """
    check_structured_outputs(constraint, field)
    if constraint.HasField("json"):
        constraint.json, lost = fitted(constraint.json)
    elif constraint.HasField("structural_tag"):
        tag = json.loads(current_form(constraint.structural_tag))
        before = json.dumps(tag)
        lost = [keyword for schema in schemas(tag) for keyword in fit(schema)]
        if (after := json.dumps(tag)) != before:
            constraint.structural_tag = after
    else:
        return ()
    return lost_names(lost, field, strict=strict)


MAX_NAME = 64
"""Characters of a name in a header's list."""


def lost_names(lost: Sequence[LostKeyword], field: str, *, strict: bool = False) -> tuple[str, ...]:
    """Return how the keywords that were left out are named to the client, each once: by their places where these are
    short. ``strict``: raise ``InvalidArgument`` for the first one."""
    if lost and strict:
        raise InvalidArgument(
            f"{field}: the keyword {lost[0].keyword} at {lost[0].where[:256]} cannot be enforced while the output is "
            "made; leave it out, or send the schema without strict",
            field,
        )
    names = []
    for keyword in lost:
        name = f"{field}{keyword.where}/{keyword.keyword}"
        is_fit = len(name) <= MAX_NAME and name.isascii() and name.isprintable() and not set(name) & set(", ")
        names.append(name if is_fit else f"{field}#.../{keyword.keyword}")
    return tuple(dict.fromkeys(names))


def check_structured_outputs(constraint: types_pb2.StructuredOutputs, field: str = FIELD) -> None:
    """Check the limits of a constraint. Raises ``InvalidArgument`` naming ``field``."""
    kind = constraint.WhichOneof("constraint")
    if kind is None:
        raise InvalidArgument(f"{field} must have one of {', '.join(KINDS)}", field)
    _check_options(constraint, kind, field)
    if kind == "json_object":
        if not constraint.json_object:
            raise InvalidArgument(f"{field}: json_object must be true if it is set", field)
        return
    if kind == "choice":
        _check_choices(constraint.choice.texts, field)
        return
    source: str = getattr(constraint, kind)
    if not source:
        raise InvalidArgument(f"{field}: {kind} is empty", field)
    _check_size(len(source.encode()), kind, field)
    if kind == "json":
        _check_schema(source, field)
    elif kind == "structural_tag":
        for schema in schemas(check_structural_tag(source, field)):
            _check_enums(schema, field)


def _check_options(constraint: types_pb2.StructuredOutputs, kind: str, field: str) -> None:
    given = ["whitespace_pattern"] if constraint.HasField("whitespace_pattern") else []
    given += ["disable_any_whitespace"] if constraint.disable_any_whitespace else []
    if given and kind not in _WITH_BLANKS:
        raise InvalidArgument(f"{field}: {given[0]} is only for {' and '.join(_WITH_BLANKS)}, not for {kind}", field)
    if len(given) > 1:
        raise InvalidArgument(f"{field} may have only one of {' and '.join(OPTIONS)}", field)
    num_bytes = len(constraint.whitespace_pattern.encode())
    if num_bytes > MAX_PATTERN_BYTES:
        raise InvalidArgument(
            f"{field}: whitespace_pattern has {num_bytes} bytes; at most {MAX_PATTERN_BYTES} are allowed", field
        )


def _check_schema(source: str, field: str) -> None:
    schema = _decoded(source, "the schema", field)
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{field}: a JSON schema must be an object", field)
    _check_enums(schema, field)


def _check_enums(schema: Mapping[str, Any], field: str) -> None:
    for values in _enums(schema):
        if len(values) > MAX_ENUM:
            raise InvalidArgument(f"{field}: an enum has {len(values)} values; at most {MAX_ENUM} are allowed", field)


def _enums(value: Any) -> Iterator[list[Any]]:
    """Yield every ``enum`` of a schema, at any depth; the depth is already checked."""
    if isinstance(value, dict):
        if isinstance(values := value.get("enum"), list):
            yield values
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _enums(part)


def _check_choices(texts: Sequence[str], field: str) -> None:
    _check_num_choices(len(texts), field)
    if not all(texts):
        raise InvalidArgument(f"{field}: choice must not hold an empty text", field)
    _check_size(sum(len(text.encode()) for text in texts), "choice", field)


def _check_num_choices(num_texts: int, field: str) -> None:
    if not 1 <= num_texts <= MAX_ENUM:
        raise InvalidArgument(f"{field}: choice must have 1 to {MAX_ENUM} texts, not {num_texts}", field)


def _check_size(num_bytes: int, kind: str, field: str) -> None:
    if num_bytes > MAX_SOURCE_BYTES:
        raise InvalidArgument(f"{field}: {kind} has {num_bytes} bytes; at most {MAX_SOURCE_BYTES} are allowed", field)


def _choices(value: object, field: str) -> types_pb2.Choices:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgument(f"{field}: choice must be a list of texts", field)
    # Counted before any is converted: the refusal of too many must not cost what their conversion does.
    _check_num_choices(len(value), field)
    return types_pb2.Choices(texts=[_text(text, "choice", field) for text in value])


def _text(value: object, kind: str, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(f"{field}: {kind} must be text", field)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{field}: {kind} holds half of a surrogate pair, not a character", field) from None
    return value


def _decoded(source: str, what: str, field: str) -> Any:
    """Return a JSON value that is not nested too deeply. The size of the source is limited: decoding takes little
    time."""
    try:
        value = json.loads(source)
    except RecursionError:
        raise _too_deep(what, field) from None
    except ValueError as error:
        raise InvalidArgument(f"{field}: {what} is not JSON: {error}", field) from None
    # Measured on the decoded value: an expression that looked for strings in the source took quadratic time, and 32 KB
    # of escaped quotes kept the gateway's event loop busy for 5 s.
    if not has_depth(value, MAX_DEPTH):
        raise _too_deep(what, field)
    return value


def _too_deep(what: str, field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {what} is nested more than {MAX_DEPTH} levels deep", field)


# Structural tags: constraints that apply to parts of a text, such as the arguments of a tool call. The form is
# xgrammar's, {"type": "structural_tag", "format": {…}}, or the older one with structures and triggers, which has the
# same meaning as a format of type triggered_tags. Only the shape is checked here; the engine's compiler finds out
# whether schemas and expressions are valid and which formats its backend supports.

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


def check_structural_tag(source: str, field: str) -> Any:
    """Check the shape and the limits of a tag, and return its format. Raises ``InvalidArgument`` naming ``field``."""
    found = _format(source, field)
    num_formats = sum(1 for _ in _checked(found, field))
    if num_formats > MAX_FORMATS:
        raise InvalidArgument(f"{field}: a structural_tag may have at most {MAX_FORMATS} formats", field)
    return found


def current_form(source: str) -> str:
    """Return a tag that was checked with a ``format``, whichever form it has."""
    return json.dumps({"type": "structural_tag", "format": _format(source, "structural_tag")})


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


def _format(source: str, field: str) -> Any:
    """Return the tag's format."""
    tag = _decoded(source, "structural_tag", field)
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
        name = _TEXTS[kind]
        if not isinstance(found.get(name), str) or not found[name]:
            raise InvalidArgument(f"{field}: {name} of the format {kind} must be a text that is not empty", field)
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


MAX_BAD_WORDS = 1024
"""Limits the token sequences of forbidden words."""
MAX_BAD_WORD_CHARS = 1024


def word_spellings(words: Sequence[str]) -> list[str]:
    """Return the two texts of each forbidden word to encode, without special tokens, because a word has other tokens at
    the start of a text than within it. Raises ``InvalidArgument``."""
    if len(words) > MAX_BAD_WORDS // 2:
        raise InvalidArgument(f"bad_words may hold at most {MAX_BAD_WORDS // 2} words, not {len(words)}", "bad_words")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidArgument(f"bad_words may hold words of 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words")
        if not word.isprintable() and any("\ud800" <= character <= "\udfff" for character in word):
            raise InvalidArgument("bad_words holds half of a surrogate pair, not a character", "bad_words")
    return [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]


def forbid_words(params: types_pb2.SamplingParams, encoded: Sequence[Sequence[int]]) -> None:
    """Add the sequences to forbid to ``params``; ``encoded`` holds the token ids of :func:`word_spellings`.

    A sequence that ends with the tokens of the plain word is forbidden by them. vLLM also leaves out the spaced word if
    the lengths differ, and so lets some words pass.
    """
    for plain, spaced in zip(encoded[::2], encoded[1::2], strict=True):
        params.bad_words.add(ids=plain)
        if list(spaced[-len(plain) :]) != list(plain):
            params.bad_words.add(ids=spaced)

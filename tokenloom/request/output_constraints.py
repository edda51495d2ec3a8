"""Converts constraints on the output (``structured_outputs``) to the wire and checks their limits.

The limits bound the cost of compilation; only the engine's compiler finds out whether a constraint is valid.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .sampling_params import StructuredOutputsParams
from .structural_tags import check_structural_tag, current_form, has_depth, schemas

FIELD = "structured_outputs"
MAX_SOURCE_BYTES = 32 << 10
"""Limits a schema, a regular expression, a grammar, and all choices together."""
MAX_DEPTH = 32
"""Limits how deep the objects and arrays of a schema are nested."""
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
        raise _too_deep(field) from None
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{field}: {what} is not JSON: {error}", field) from None


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
        check_structural_tag(source, field)
        for schema in schemas(json.loads(current_form(source))):
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
    try:
        schema = json.loads(source)
    except RecursionError:
        raise _too_deep(field) from None
    except ValueError as error:
        raise InvalidArgument(f"{field}: the schema is not JSON: {error}", field) from None
    if not isinstance(schema, dict):
        raise InvalidArgument(f"{field}: a JSON schema must be an object", field)
    # Measured on the decoded schema: an expression that looked for strings in the source took quadratic time, and 32 KB
    # of escaped quotes kept the gateway's event loop busy for 5 s.
    if not has_depth(schema, MAX_DEPTH):
        raise _too_deep(field)
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


def _too_deep(field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: the schema is nested more than {MAX_DEPTH} levels deep", field)

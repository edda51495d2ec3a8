"""Converts JSON and Python values to ``SamplingParams``, for the gateway, the client and the offline API.

None means unset. A wrong type, or a number that the wire cannot carry, raises ``InvalidArgument`` naming the field;
whether a number is in its range is checked by :mod:`.validation`.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import inspect

from tokenloom.process.argument_schemas import MAX_ARGUMENT_BYTES
from tokenloom.v1 import types_pb2

from .errors import InvalidArgument
from .output_constraints import narrow_structured_outputs
from .sampling_params import (
    MAX_LOGIT_BIASES,
    MAX_REPETITION,
    MAX_TOKEN_IDS,
    GenerationFields,
    RepetitionDetectionParams,
    SamplingFields,
)

(MIN_TEMPERATURE,) = struct.unpack("<f", struct.pack("<f", 1e-5))
"""Dividing logits by a lower temperature would overflow float32; 0 is greedy. Rounded to the wire's float32."""
_U32 = 2**32 - 1
ALL_LOGPROBS = _U32
"""The wire's form of -1: more than any vocabulary holds."""


def narrow_sampling(values: Mapping[str, object]) -> types_pb2.SamplingParams:
    """Convert the sampling parameters in ``values``, whose keys are the proto's field names."""
    wire = {}
    for name, value in values.items():
        if name not in SAMPLING_NAMES:
            raise InvalidArgument(f"{name} is not a sampling parameter", name)
        if value is not None:
            wire[name] = _NARROW[name](name, value)
    return types_pb2.SamplingParams(**wire)


def narrow(name: str, value: object) -> Any:
    """Convert the value of one row of the table to the row's type."""
    return _NARROW[name](name, value)


def narrow_int(name: str, value: object, low: int, high: int) -> int:
    """Return ``value`` as an int within [low, high]; a float without a fraction is accepted."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgument(f"{name} must be an integer, not {_kind(value)}", name)
    if not low <= value <= high:
        raise InvalidArgument(f"{name} must be from {low} to {high}", name)
    return value


def narrow_token_ids(name: str, value: object, most: int | None = None) -> list[int]:
    """Return ``value`` as token ids that the wire can carry, at most so many; they are compared with the vocabulary
    later."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InvalidArgument(f"{name} must be a list of token ids, not {_kind(value)}", name)
    if most is not None and len(value) > most:
        raise InvalidArgument(f"{name} may hold at most {most} ids, not {len(value)}", name)
    return [item if type(item) is int and 0 <= item <= _U32 else _narrow_token_id(name, item) for item in value]


def _narrow_token_id(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer() and 0 <= value <= _U32:
        return int(value)  # JSON has only numbers
    raise InvalidArgument(f"{name} must hold token ids, integers from 0 to {_U32}", name)


def _narrow_float(name: str, value: object) -> float:
    """NaN and infinities pass, to be refused with the numbers that are out of range."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidArgument(f"{name} must be a number, not {_kind(value)}", name)
    try:
        return float(value)
    except OverflowError:
        raise InvalidArgument(f"{name} must be below 1.8e308, as a number of 64 bits is", name) from None


def _narrow_bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} must be true or false, not {_kind(value)}", name)
    return value


def _narrow_some_token_ids(name: str, value: object, most: int | None = None) -> list[int]:
    token_ids = narrow_token_ids(name, value, most)
    if not token_ids:
        raise InvalidArgument(f"{name} is empty, so nothing could be generated; leave it out to allow everything", name)
    return token_ids


def _narrow_temperature(name: str, value: object) -> float:
    temperature = _narrow_float(name, value)
    return 0.0 if 0 < temperature < MIN_TEMPERATURE else temperature  # greedy in effect


def _narrow_logprobs(name: str, value: object) -> int | None:
    if value is False:
        return None
    count = narrow_int(name, value, -1, _U32)
    return ALL_LOGPROBS if count == -1 else count


def _narrow_logit_bias(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must be an object of token ids and numbers, not {_kind(value)}", name)
    check_bias_count(len(value), name)
    biases = {}
    for key, bias in value.items():
        # The keys of JSON objects are strings.
        digits = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= len(str(_U32))
        token_id = int(key) if digits else key
        if type(token_id) is not int or not 0 <= token_id <= _U32:
            raise InvalidArgument(f"{name} must have token ids as keys, not {key!r:.40}", name)
        biases[token_id] = _narrow_float(name, bias)
    return biases


def check_bias_count(num_biases: int, name: str = "logit_bias") -> None:
    """Check the number of biased tokens, before they are looked at."""
    if num_biases > MAX_LOGIT_BIASES:
        raise InvalidArgument(f"{name} may hold at most {MAX_LOGIT_BIASES} tokens, not {num_biases}", name)


def _narrow_extra_args(name: str, value: object) -> str | None:
    """Return the arguments as JSON; whether a plugin declares them is checked later. None: there are none."""
    if not isinstance(value, Mapping):
        raise InvalidArgument(f"{name} must be an object of names and values, not {_kind(value)}", name)
    try:
        text = json.dumps(dict(value), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidArgument(f"{name} must hold what JSON can: numbers, texts, lists and objects", name) from None
    if len(text) > MAX_ARGUMENT_BYTES:
        raise InvalidArgument(f"{name} has {len(text)} bytes as JSON; at most {MAX_ARGUMENT_BYTES} are allowed", name)
    return text if value else None


def _narrow_repetition_detection(name: str, value: object) -> types_pb2.RepetitionDetection | None:
    """As in vLLM, a largest size of 0 turns it off, and a smallest of 0 means 1."""
    sizes = RepetitionDetectionParams.__struct_fields__
    if isinstance(value, RepetitionDetectionParams):
        value = {size: getattr(value, size) for size in sizes}
    if not isinstance(value, Mapping) or not set(value) <= set(sizes):
        raise InvalidArgument(f"{name} must be an object of {', '.join(sizes)}", name)
    try:
        numbers = {size: narrow_int(size, value.get(size, 0), 0, MAX_REPETITION) for size in sizes}
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error.message}", name) from None
    numbers["min_pattern_size"] = numbers["min_pattern_size"] or 1
    return types_pb2.RepetitionDetection(**numbers) if numbers["max_pattern_size"] else None


def _kind(value: object) -> str:
    return {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}.get(
        type(value), type(value).__name__
    )


def _narrow_strings(name: str, value: object, *, one: bool) -> list[str]:
    if isinstance(value, str) and one:
        return [value]
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise InvalidArgument(f"{name} must be {'a string or ' if one else ''}a list of strings", name)
    return list(value)


def rows(table: type) -> Iterator[tuple[str, inspect.Type]]:
    """Yield the name and the type of each row of a table, without description and None."""
    info = inspect.type_info(table)
    assert isinstance(info, inspect.StructType)
    for field in info.fields:
        kind = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
        if isinstance(kind, inspect.UnionType):
            (kind, *_) = (each for each in kind.types if not isinstance(each, inspect.NoneType))
        yield field.name, kind


def _narrower(row: inspect.Type) -> Callable[[str, Any], Any]:
    """Choose the conversion for a row by its type."""
    match row:
        case inspect.FloatType():
            return _narrow_float
        case inspect.BoolType():
            return _narrow_bool
        case inspect.IntType():
            high = row.le if row.le is not None else _U32
            return partial(narrow_int, low=row.ge or 0, high=high)
        case inspect.StrType():
            return partial(_narrow_strings, one=True)
        case inspect.ListType(item_type=inspect.StrType()):
            return partial(_narrow_strings, one=False)
        case inspect.ListType():
            return partial(
                _narrow_some_token_ids if row.min_length else narrow_token_ids, most=row.max_length or MAX_TOKEN_IDS
            )
        case inspect.DictType():
            return _narrow_logit_bias
    raise TypeError(f"no conversion for rows of type {row}")


_OWN_RULES: dict[str, Callable[[str, Any], Any]] = {
    "temperature": _narrow_temperature,
    "top_k": lambda name, value: max(narrow_int(name, value, -1, _U32), 0),  # both -1 and 0 are off
    "seed": lambda name, value: narrow_int(name, value, -(2**63), 2**64 - 1) % 2**64,
    "logprobs": _narrow_logprobs,
    "prompt_logprobs": _narrow_logprobs,
    "repetition_detection": _narrow_repetition_detection,
    "extra_args": _narrow_extra_args,
    "structured_outputs": lambda name, value: narrow_structured_outputs(value, name),
}
_NARROW = {name: _OWN_RULES.get(name) or _narrower(row) for name, row in rows(GenerationFields)}
SAMPLING_NAMES = frozenset({*SamplingFields.__struct_fields__, "structured_outputs"})
"""The names that :func:`narrow_sampling` accepts."""

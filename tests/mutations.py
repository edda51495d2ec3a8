"""Changes protobuf messages as a peer that lies, or is broken, might."""

import random
from collections.abc import Mapping, Sequence
from math import inf, nan
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

_SIGNED = (0, 1, -1, 7, 2**31 - 1, -(2**31))
_UNSIGNED = (0, 1, 7, 255, 2**31 - 1, 2**31, 2**32 - 1)
_NUMBERS = (0.0, -1.0, 1.0, 1e30, nan, inf, -inf)
_VALUES: Mapping[int, Sequence[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: _SIGNED,
    FieldDescriptor.CPPTYPE_INT64: (*_SIGNED, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: _UNSIGNED,
    FieldDescriptor.CPPTYPE_UINT64: (*_UNSIGNED, 2**64 - 1),
    FieldDescriptor.CPPTYPE_FLOAT: _NUMBERS,
    FieldDescriptor.CPPTYPE_DOUBLE: (*_NUMBERS, 1e308),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 99),
}
_TEXTS = ("", "x", "\0", "{", "é" * 1000, "unix:/nowhere", "127.0.0.1:1")
_DEPTH = 4


def mutated(message: M, rng: random.Random, times: int = 1) -> M:
    """Return a copy in which so many fields, on any level, have another value, or none, or one more or less."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(times):
        _mutate(changed, rng, _DEPTH)
    return changed


def _mutate(message: Message, rng: random.Random, depth: int) -> None:
    fields = list(message.DESCRIPTOR.fields)
    present = [field for field, _ in message.ListFields()]
    # Most of what is present is what the receiver reads next.
    field = rng.choice(present if present and rng.random() < 0.7 else fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        message.ClearField(field.name)
    elif field.is_repeated:
        _mutate_list(getattr(message, field.name), field, rng, depth)
    elif field.message_type is None:
        setattr(message, field.name, _value(field, rng))
    elif depth and rng.random() < 0.8:
        _mutate(getattr(message, field.name), rng, depth - 1)
    else:
        message.ClearField(field.name)


def _mutate_list(values: Any, field: FieldDescriptor, rng: random.Random, depth: int) -> None:
    change = rng.choice(("drop", "clear", "repeat", "change", "change"))
    if change == "clear":
        del values[:]
    elif change == "drop" and values:
        del values[rng.randrange(len(values))]
    elif field.message_type is not None:
        if change == "repeat" and values:
            values.add().CopyFrom(values[rng.randrange(len(values))])
        elif depth:
            _mutate(rng.choice(values) if values and rng.random() < 0.8 else values.add(), rng, depth - 1)
    elif change == "repeat" and values:
        values.extend(list(values) * rng.choice((1, 100)))
    elif values and rng.random() < 0.7:
        values[rng.randrange(len(values))] = _value(field, rng)
    else:
        values.append(_value(field, rng))


def _value(field: FieldDescriptor, rng: random.Random) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        is_bytes = field.type == FieldDescriptor.TYPE_BYTES
        return rng.randbytes(rng.choice((0, 1, 15, 16, 4096))) if is_bytes else rng.choice(_TEXTS)
    return rng.choice(_VALUES[field.cpp_type])

"""msgpack on every socket of the core. The receiver names the type it expects, so nothing but plain data can arrive.

A message is a list of ZMQ frames: the msgpack body, and after it room for out-of-band buffers. No message carries any
yet, so a second frame is refused.
"""

import inspect
import typing
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode(message: object) -> list[bytes]:
    """The frames of ``message``."""
    return [_encoder.encode(message)]


class Decoder(Generic[T]):
    """Decodes messages of one type (or union). Raises ``msgspec.DecodeError`` for anything else."""

    def __init__(self, message_type: type[T] | UnionType) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def decode(self, frames: Sequence[bytes]) -> T:
        if len(frames) != 1:
            raise msgspec.DecodeError(f"a message of {len(frames)} frames: only the msgpack body is known")
        return self._decoder.decode(frames[0])


def to_raw(value: object) -> msgspec.Raw:
    """``value`` as msgpack inside another message, to be decoded by whoever knows its type."""
    return msgspec.Raw(_encoder.encode(value))


def from_raw(raw: msgspec.Raw) -> object:
    """The plain value (None, bool, number, str, bytes, list, dict) of ``raw``."""
    value: object = msgspec.msgpack.decode(raw)
    return value


def call_with_raw(function: Callable[..., object], arguments: Sequence[msgspec.Raw]) -> object:
    """Calls ``function`` with its positional arguments decoded to the types it annotates.

    Raises ``TypeError`` for a wrong number of arguments, ``msgspec.DecodeError`` for one of a wrong type.
    """
    bound = inspect.signature(function).bind(*arguments)
    hints = typing.get_type_hints(function)
    return function(
        *(msgspec.msgpack.decode(raw, type=hints.get(name, object)) for name, raw in bound.arguments.items())
    )

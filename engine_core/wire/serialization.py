"""Encodes and decodes the messages on the core's sockets with msgpack. The receiver names the type that it expects, so
only plain data can arrive.

A message is a list of frames: the msgpack body, and one frame for each array that is too large for the body. In the
body an array is (dtype, shape, bytes), (dtype, shape, number of its frame from 1), or, if sender and receiver share
memory with enough room, (dtype, shape, region). An array must not change after it was encoded, because it may be sent
and received without a copy.
"""

import inspect
import math
import threading
import typing
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from .array_arena import ArenaReader, Loan, Region

T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
Frame = Buffer
Array = npt.NDArray[Any]

MAX_INLINE_BYTES = 256
"""Limit of an array in the body: copying so few bytes costs less than a frame (as in vLLM)."""
_MAX_DIMENSIONS = 8
_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQefd"}


class _ArrayFrames(threading.local):
    """Holds the arrays of the message that this thread is encoding."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.loan: Loan | None = None


_arrays = _ArrayFrames()


def _encode_array(value: object) -> tuple[str, tuple[int, ...], bytes | int | Region]:
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        raise NotImplementedError(f"a message cannot carry {type(value).__name__}")
    if value.nbytes <= MAX_INLINE_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if _arrays.loan is not None and (region := _arrays.loan.put(value)) is not None:
        return value.dtype.str, value.shape, region
    _arrays.frames.append(np.ascontiguousarray(value).data.cast("B"))
    return value.dtype.str, value.shape, len(_arrays.frames)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: object, loan: Loan | None = None, into: bytearray | None = None) -> list[Frame]:
    """Return the frames of ``message``: the body, and the memory of its arrays that ``loan`` did not take. If ``into``
    is given, its content is replaced and it becomes the body."""
    _arrays.loan = loan
    try:
        if into is None:
            return [_encoder.encode(message), *_arrays.frames]
        _encoder.encode_into(message, into)
        return [into, *_arrays.frames]
    finally:
        _arrays.loan = None
        if _arrays.frames:
            _arrays.frames = []


class Decoder(Generic[T]):
    """Decodes messages of one type (or union) in one thread. Raises ``msgspec.DecodeError`` for anything else.

    Arrays are read-only views of their frames and regions. An array's dtype must be the annotated one, its size must
    fit its shape, and each frame and region must be used exactly once.
    """

    def __init__(self, message_type: type[T] | UnionType, arena: ArenaReader | None = None) -> None:
        self._arena = arena
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=self._decode_array)
        self._frames: Sequence[Frame] = ()
        self._unused: set[int] = set()

    def decode(self, frames: Sequence[Frame]) -> T:
        """Return the message in ``frames``."""
        if not frames:
            raise msgspec.DecodeError("the message has no frames")
        self._frames = frames
        self._unused = set(range(1, len(frames)))
        try:
            message = self._decoder.decode(frames[0])
        except UnicodeDecodeError as error:  # msgspec does not convert this error of a broken text
            raise msgspec.DecodeError(str(error)) from None
        finally:
            self._frames = ()
        # A frame that nothing names is a sender with another version of the message, or an attack on memory: both are
        # refused.
        if self._unused:
            raise msgspec.DecodeError(f"the message does not refer to {len(self._unused)} of its frames")
        return message

    def _decode_array(self, kind: type, value: object) -> Array:
        dtype, shape, body = msgspec.convert(value, tuple[str, tuple[int, ...], bytes | int | Region])
        if dtype not in _DTYPES or len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise ValueError(f"an array of dtype {dtype!r} and shape {shape} is not allowed")
        if (wanted := _annotated_dtype(kind)) is not None and _DTYPES[dtype] != wanted:
            raise ValueError(f"the array has dtype {dtype}, expected {wanted.str}")
        frame = body if isinstance(body, bytes) else self._take_frame(body)
        if len(frame) != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"{len(frame)} bytes do not fit an array of dtype {dtype} and shape {shape}")
        array: Array = np.frombuffer(frame, _DTYPES[dtype]).reshape(shape)
        # Several requests may read one frame, and a region of shared memory belongs to its sender.
        array.flags.writeable = False
        return array

    def _take_frame(self, index: int | Region) -> Frame:
        if isinstance(index, Region):
            if self._arena is None:
                raise ValueError("the array is in shared memory, but this receiver has none")
            return self._arena.open(index)
        if index not in self._unused:
            raise ValueError(f"frame {index} does not exist, or belongs to another array")
        self._unused.remove(index)
        return self._frames[index]


def _annotated_dtype(kind: type) -> "np.dtype[Any] | None":
    """Return ``x`` of ``npt.NDArray[x]``; None if any dtype is allowed."""
    scalars = [typing.get_args(argument) for argument in typing.get_args(kind)[1:]]
    if not scalars or not isinstance(scalars[0][0], type):
        return None
    return np.dtype(scalars[0][0])


def to_raw(value: object) -> msgspec.Raw:
    """Encode ``value`` without large arrays inside another message, for a receiver that knows the type later."""
    body, *arrays = encode(value)
    if arrays:
        raise TypeError(
            f"an argument or result of a call must not contain an array of more than {MAX_INLINE_BYTES} bytes"
        )
    return msgspec.Raw(body)


def from_raw(raw: msgspec.Raw) -> object:
    """Return the plain value (None, bool, number, str, bytes, list, dict) of ``raw``."""
    value: object = msgspec.msgpack.decode(raw)
    return value


def call_with_raw(function: Callable[..., object], arguments: Sequence[msgspec.Raw]) -> object:
    """Call ``function`` with its positional arguments decoded to the annotated types.

    Raises ``TypeError`` for a wrong number of arguments, ``msgspec.DecodeError`` for a wrong type.
    """
    bound = inspect.signature(function).bind(*arguments)
    hints = typing.get_type_hints(function)
    return function(
        *(msgspec.msgpack.decode(raw, type=hints.get(name, object)) for name, raw in bound.arguments.items())
    )

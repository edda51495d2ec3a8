"""msgpack on every socket of the core. The receiver names the type it expects, so nothing but plain data can arrive.

A message is a list of ZMQ frames: the msgpack body, and one frame for each array of the message that is too large to
lie in the body. In the body an array is (dtype, shape, bytes), (dtype, shape, number of its frame from 1), or, where
sender and receiver share memory and it has room, (dtype, shape, region). Nobody may write to an array that was encoded:
it may be sent, and is received, without a copy.
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
Frame = bytes | bytearray | memoryview
Array = npt.NDArray[Any]

MAX_INLINE_BYTES = 256
"""Of an array in the body: a frame of its own costs more than copying so little (as in vLLM)."""
_MAX_DIMENSIONS = 8
_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "?bBhHiIqQefd"}


class _ArrayFrames(threading.local):
    """Arrays of the message that this thread is encoding."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.loan: Loan | None = None


_arrays = _ArrayFrames()


def _encode_array(value: object) -> tuple[str, tuple[int, ...], bytes | int | Region]:
    if not isinstance(value, np.ndarray) or value.dtype.str not in _DTYPES:
        raise NotImplementedError(f"{type(value).__name__} is not data that a message may carry")
    if value.nbytes <= MAX_INLINE_BYTES:
        return value.dtype.str, value.shape, value.tobytes()
    if _arrays.loan is not None and (region := _arrays.loan.put(value)) is not None:
        return value.dtype.str, value.shape, region
    _arrays.frames.append(np.ascontiguousarray(value).data.cast("B"))
    return value.dtype.str, value.shape, len(_arrays.frames)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: object, loan: Loan | None = None, into: bytearray | None = None) -> list[Frame]:
    """The frames of ``message``; those after the first are the memory of its arrays, of those that ``loan`` did not
    take. ``into``, whose content is replaced, becomes the first frame."""
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
    """Decodes messages of one type (or union), in one thread. Raises ``msgspec.DecodeError`` for anything else.

    Arrays are read-only views of their frames and regions. Their dtype must be the annotated one, their bytes as many
    as their shape says, and each frame, and region, must be used once.
    """

    def __init__(self, message_type: type[T] | UnionType, arena: ArenaReader | None = None) -> None:
        self._arena = arena
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type, dec_hook=self._decode_array)
        self._frames: Sequence[Frame] = ()
        self._unused: set[int] = set()

    def decode(self, frames: Sequence[Frame]) -> T:
        if not frames:
            raise msgspec.DecodeError("a message without frames")
        self._frames = frames
        self._unused = set(range(1, len(frames)))
        try:
            message = self._decoder.decode(frames[0])
        except UnicodeDecodeError as error:  # of a text that is none, which msgspec lets through
            raise msgspec.DecodeError(str(error)) from None
        finally:
            self._frames = ()
        if self._unused:
            raise msgspec.DecodeError(f"a message with {len(self._unused)} frames that it does not refer to")
        return message

    def _decode_array(self, kind: type, value: object) -> Array:
        dtype, shape, body = msgspec.convert(value, tuple[str, tuple[int, ...], bytes | int | Region])
        if dtype not in _DTYPES or len(shape) > _MAX_DIMENSIONS or min(shape, default=0) < 0:
            raise ValueError(f"no array of dtype {dtype!r} and shape {shape} may come")
        if (wanted := _annotated_dtype(kind)) is not None and _DTYPES[dtype] != wanted:
            raise ValueError(f"an array of dtype {dtype}, not {wanted.str}")
        frame = body if isinstance(body, bytes) else self._take_frame(body)
        if len(frame) != math.prod(shape) * _DTYPES[dtype].itemsize:
            raise ValueError(f"{len(frame)} bytes for an array of dtype {dtype} and shape {shape}")
        array: Array = np.frombuffer(frame, _DTYPES[dtype]).reshape(shape)
        array.flags.writeable = False
        return array

    def _take_frame(self, index: int | Region) -> Frame:
        if isinstance(index, Region):
            if self._arena is None:
                raise ValueError("an array in shared memory, of which there is none here")
            return self._arena.open(index)
        if index not in self._unused:
            raise ValueError(f"frame {index} is not there, or belongs to another array")
        self._unused.remove(index)
        return self._frames[index]


def _annotated_dtype(kind: type) -> "np.dtype[Any] | None":
    """Of ``npt.NDArray[x]``, ``x``; None: any."""
    scalars = [typing.get_args(argument) for argument in typing.get_args(kind)[1:]]
    if not scalars or not isinstance(scalars[0][0], type):
        return None
    return np.dtype(scalars[0][0])


def to_raw(value: object) -> msgspec.Raw:
    """``value``, which holds no large arrays, as msgpack inside another message, to be decoded by whoever knows its
    type."""
    body, *arrays = encode(value)
    if arrays:
        raise TypeError(f"an array of more than {MAX_INLINE_BYTES} bytes cannot be an argument or a result of a call")
    return msgspec.Raw(body)


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

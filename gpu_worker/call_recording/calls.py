"""Describes the calls of kernels, and of the few operations of PyTorch that a recording may hold: what each was called
with, and where addresses are among its arguments."""

import struct
from collections.abc import Callable, Iterator, Mapping
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p, cast, sizeof
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..kernels.library import load_replay

_LETTERS: dict[Any, str] = {c_void_p: "P", c_int64: "q", c_int32: "i", c_float: "f"}


class UnrecordableError(Exception):
    """Raised when a step contains an operation that cannot be recorded; the message names it."""


class Call(NamedTuple):
    """Holds a call of a kernel."""

    function: int
    """The address of its code."""
    letters: str
    """The types of its arguments, a letter for each."""
    words: list[int]
    """The arguments as 64-bit words; the address of ``args`` if there is one."""
    args: Structure | None
    """A copy of the struct that the kernel's only argument points to; None: the arguments are numbers and addresses."""

    def addresses(self) -> Iterator[int]:
        """Return the addresses that the kernel reads or writes."""
        if self.args is not None:
            for name in pointer_fields(self.args):
                yield getattr(self.args, name) or 0
        else:
            for letter, word in zip(self.letters, self.words, strict=True):
                if letter == "P":
                    yield word

    def relocate(self, moved: Callable[[int], int]) -> "Call":
        """Return the same call with every address replaced."""
        if self.args is None:
            words = [moved(w) if x == "P" else w for x, w in zip(self.letters, self.words, strict=True)]
            return self._replace(words=words)
        args = _copy(self.args)
        for name in pointer_fields(args):
            if (address := getattr(args, name)) is not None:
                setattr(args, name, moved(address))
        return self._replace(words=[addressof(args)], args=args)


class RankExchange(NamedTuple):
    """Holds an exchange with other ranks that is no kernel: Python makes it between two runs of kernels."""

    perform: Callable[[Tensor], object]
    """Sends a tensor, replaces its content, or both."""
    tensor: Tensor
    """What was exchanged in the recorded step."""

    def addresses(self) -> Iterator[int]:
        """Return the addresses that the exchange reads or writes."""
        yield self.tensor.data_ptr()


Entry: TypeAlias = Call | RankExchange
"""What a recorded step consists of."""


class RecordedExchange(NamedTuple):
    """Holds what an exchange with other ranks was in the recorded step, so that its recording can be tried without
    them."""

    number: int
    """The place of the exchange among the calls of the step."""
    address: int
    """Of the tensor."""
    before: bytes | None
    """The content that the other ranks got; None: they got nothing."""
    after: bytes | None
    """The content that the exchange left; None: it left the tensor as it was."""


def describe(function: Any, arguments: tuple[Any, ...]) -> Call:
    """Describe a call of a ctypes function. Raises :class:`UnrecordableError` for arguments of other types."""
    address = cast(function, c_void_p).value or 0
    if len(arguments) == 1 and isinstance(target := getattr(arguments[0], "_obj", None), Structure):
        args = _copy(target)
        return Call(address, "P", [addressof(args)], args)
    types = function.argtypes or ()
    # A kernel with a result is one that Python looks at: a replay would go on whatever it says.
    if len(types) != len(arguments) or function.restype is not None:
        raise UnrecordableError(f"{function.__name__} has no declared signature")
    letters = "".join(_LETTERS.get(kind, "?") for kind in types)
    return Call(address, letters, [_word(x, a) for x, a in zip(letters, arguments, strict=True)], None)


def pointer_fields(args: Structure) -> list[str]:
    """Return the names of a struct's addresses."""
    return [field[0] for field in args._fields_ if field[1] is c_void_p]


def _copy(args: Structure) -> Structure:
    return type(args).from_buffer_copy(args)


def _word(letter: str, argument: Any) -> int:
    if letter == "f":
        return int.from_bytes(struct.pack("<f", argument), "little")
    return int(argument or 0) & 0xFFFFFFFFFFFFFFFF


assert sizeof(c_void_p) == 8, "addresses are words"


_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.bfloat16)


class RecordedCalls(Protocol):
    """Collects the calls and the memory of a step; see :class:`~.recorder.Recorder`."""

    def note(self, function: Any, *arguments: Any) -> None: ...

    def keep(self, tensor: Tensor) -> None: ...


def _gather(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
    table, indices = args[:2]
    _require(table.is_contiguous() and indices.is_contiguous() and indices.dtype == torch.int64, "an odd embedding")
    calls.keep(result)
    pointers = (each.data_ptr() for each in (table, indices, result))
    calls.note(load_replay().gather_rows, *pointers, indices.numel(), table.shape[1] * table.itemsize, len(table))


def _record_copy(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
    calls.keep(result)
    _copy_rows(calls, args[0], result)


def _copy_into(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
    _copy_rows(calls, args[1], args[0])


def _copy_rows(calls: RecordedCalls, source: Tensor, target: Tensor) -> None:
    is_plain = source.dim() == target.dim() == 2 and source.stride(1) == target.stride(1) == 1
    _require(is_plain and source.dtype == target.dtype and source.shape == target.shape, "a copy of odd tensors")
    rows, size = source.shape
    parts = ((each.data_ptr(), each.stride(0) * each.itemsize) for each in (source, target))
    calls.note(load_replay().copy_rows, *(x for part in parts for x in part), rows, size * source.itemsize)


def _convert(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
    source = args[0]
    _require(source.dtype == torch.bfloat16 and result.dtype == torch.float32, "a conversion")
    _require(source.is_contiguous(), "a conversion of an odd tensor")
    calls.keep(result)
    calls.note(load_replay().widen, source.data_ptr(), result.data_ptr(), source.numel())


def _add(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
    target, source = args
    is_plain = isinstance(source, Tensor) and source.shape == target.shape and source.dtype == target.dtype
    _require(is_plain and _are_plain(target, source), "a sum of odd tensors")
    pointers = (target.data_ptr(), source.data_ptr())
    calls.note(load_replay().add_to, target.dtype == torch.bfloat16, *pointers, target.numel())


def _scale(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
    target, factor = args
    _require(isinstance(factor, float | int) and _are_plain(target), "a product of tensors")
    calls.note(load_replay().scale, target.dtype == torch.bfloat16, target.data_ptr(), factor, target.numel())


def _are_plain(*tensors: Tensor) -> bool:
    return all(each.is_contiguous() and each.dtype in _FLOATS for each in tensors)


def _require(is_known: bool, operation: str) -> None:
    if not is_known:
        raise UnrecordableError(f"{operation} is not a kernel")


TORCH_CALLS: Mapping[Any, Callable[[RecordedCalls, tuple[Any, ...], Any], None]] = {
    _aten.embedding.default: _gather,
    _aten.contiguous.default: _record_copy,
    _aten.clone.default: _record_copy,
    _aten.copy_.default: _copy_into,
    _aten.to.dtype: _convert,
    _aten._to_copy.default: _convert,
    _aten.add_.Tensor: _add,
    _aten.mul_.Tensor: _scale,
}
"""Adds to a recording what an operation with these arguments and this result does."""

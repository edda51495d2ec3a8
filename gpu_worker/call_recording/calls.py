"""Describes the calls of kernels: what each was called with, and where addresses are among its arguments."""

import struct
from collections.abc import Callable, Iterator
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p, cast, sizeof
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

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

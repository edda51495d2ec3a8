"""Records what a step does while PyTorch computes it: each call of a kernel, and the memory that it takes meanwhile;
and describes the calls of kernels, and of the few operations of PyTorch that a recording may hold: what each was called
with, and where addresses are among its arguments."""

import contextlib
import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p, cast, sizeof
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.library import load_replay, loaded_libraries

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

    perform: Callable[..., object]
    """Sends a tensor, replaces its content, or both; or sends one, and fills another one."""
    tensors: tuple[Tensor, ...]
    """What was exchanged in the recorded step."""

    def addresses(self) -> Iterator[int]:
        """Return the addresses that the exchange reads or writes."""
        return (tensor.data_ptr() for tensor in self.tensors)


Entry: TypeAlias = Call | RankExchange
"""What a recorded step consists of."""


class RecordedExchange(NamedTuple):
    """Holds what an exchange with other ranks was in the recorded step, so that its recording can be tried without
    them."""

    number: int
    """The place of the exchange among the calls of the step."""
    given: int
    """The address of the tensor that the other ranks got."""
    before: bytes | None
    """Its content then; None: they got nothing."""
    left: int
    """The address of the tensor that the exchange wrote, most often the same."""
    after: bytes | None
    """Its content then; None: nothing was written."""


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


def _gather(calls: "CallRecorder", args: tuple[Any, ...], result: Tensor) -> None:
    table, indices = args[:2]
    _require(table.is_contiguous() and indices.is_contiguous() and indices.dtype == torch.int64, "an odd embedding")
    calls.keep(result)
    pointers = (each.data_ptr() for each in (table, indices, result))
    calls.note(load_replay().gather_rows, *pointers, indices.numel(), table.shape[1] * table.itemsize, len(table))


def _record_copy(calls: "CallRecorder", args: tuple[Any, ...], result: Tensor) -> None:
    calls.keep(result)
    _copy_rows(calls, args[0], result)


def _copy_into(calls: "CallRecorder", args: tuple[Any, ...], result: Tensor) -> None:
    _copy_rows(calls, args[1], args[0])


def _copy_rows(calls: "CallRecorder", source: Tensor, target: Tensor) -> None:
    is_plain = source.dim() == target.dim() == 2 and source.stride(1) == target.stride(1) == 1
    _require(is_plain and source.dtype == target.dtype and source.shape == target.shape, "a copy of odd tensors")
    rows, size = source.shape
    parts = ((each.data_ptr(), each.stride(0) * each.itemsize) for each in (source, target))
    calls.note(load_replay().copy_rows, *(x for part in parts for x in part), rows, size * source.itemsize)


def _convert(calls: "CallRecorder", args: tuple[Any, ...], result: Tensor) -> None:
    source = args[0]
    _require(source.dtype == torch.bfloat16 and result.dtype == torch.float32, "a conversion")
    _require(source.is_contiguous(), "a conversion of an odd tensor")
    calls.keep(result)
    calls.note(load_replay().widen, source.data_ptr(), result.data_ptr(), source.numel())


def _add(calls: "CallRecorder", args: tuple[Any, ...], result: Tensor) -> None:
    target, source = args
    is_plain = isinstance(source, Tensor) and source.shape == target.shape and source.dtype == target.dtype
    _require(is_plain and _are_plain(target, source), "a sum of odd tensors")
    pointers = (target.data_ptr(), source.data_ptr())
    calls.note(load_replay().add_to, target.dtype == torch.bfloat16, *pointers, target.numel())


def _scale(calls: "CallRecorder", args: tuple[Any, ...], result: Tensor) -> None:
    target, factor = args
    _require(isinstance(factor, float | int) and _are_plain(target), "a product of tensors")
    calls.note(load_replay().scale, target.dtype == torch.bfloat16, target.data_ptr(), factor, target.numel())


def _are_plain(*tensors: Tensor) -> bool:
    return all(each.is_contiguous() and each.dtype in _FLOATS for each in tensors)


def _require(is_known: bool, operation: str) -> None:
    if not is_known:
        raise UnrecordableError(f"{operation} is not a kernel")


TORCH_CALLS: Mapping[Any, Callable[["CallRecorder", tuple[Any, ...], Any], None]] = {
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


_ALLOCATIONS = frozenset((_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default))
_recording = threading.Lock()
"""Kernels have one hook each, so one step of a process is recorded at a time."""


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of PyTorch as a dispatch mode, and the calls of kernels through their ``errcheck`` hooks.

    Only allocations, views and the operations of :data:`TORCH_CALLS` may be among PyTorch's. After any
    other one :attr:`failure` names it; the step is computed to its end all the same.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Entry] = []
        self.exchanged: list[RecordedExchange] = []
        """What the exchanges with other ranks read and wrote, in order."""
        self.tensors: dict[int, Tensor] = {}
        """The memory that the step allocated, by address. The tensors keep it from being used twice."""
        self.failure: str | None = None
        self.thread = threading.get_ident()
        self.is_exchanging = False

    @classmethod
    # PyTorch wraps dispatch modes in a function that imports torch._dynamo: the first decode step took more than a
    # second.
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports PyTorch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.failure is None and not self.is_exchanging:
            try:
                self._note_operation(func, args, result)
            except UnrecordableError as error:
                self.failure = str(error)
        return result

    def note(self, function: Any, *arguments: Any) -> None:
        """Add the call of a kernel. Raises :class:`UnrecordableError`."""
        self.calls.append(describe(function, arguments))

    def keep(self, tensor: Tensor) -> None:
        """Note that the step allocated the memory of ``tensor``."""
        self.tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    def exchange(
        self,
        perform: Callable[..., object],
        tensor: Tensor,
        *,
        reads: bool,
        writes: bool,
        into: Tensor | None = None,
    ) -> None:
        """Exchange a tensor with other ranks, and record it: the kernel that does it if one is called, otherwise
        ``perform``.

        Args:
            perform: Reads the tensor that it gets, overwrites it, or both. Each run of the recording calls it anew.
            tensor: On the CPU.
            reads: Whether the content of ``tensor`` before the exchange counts.
            writes: Whether the exchange changes ``tensor``.
            into: What the exchange fills while it leaves ``tensor`` as it is; ``perform`` gets it, too.
        """
        tensors = (tensor,) if into is None else (tensor, into)
        before = _content(tensor) if reads else None
        num_calls = len(self.calls)
        self.is_exchanging = True
        try:
            perform(*tensors)
        finally:
            self.is_exchanging = False
        if self.failure is not None:
            return
        if not all(each.is_contiguous() for each in tensors) or len(self.calls) > num_calls + 1:
            self.failure = "an exchange of an odd tensor"
            return
        if len(self.calls) == num_calls:
            self.calls.append(RankExchange(perform, tensors))
        given, left = tensors[0], tensors[-1]
        after = _content(left) if writes or into is not None else None
        self.exchanged.append(RecordedExchange(num_calls, given.data_ptr(), before, left.data_ptr(), after))

    def hear(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Note a call that a kernel's hook reports, if this thread made it."""
        if self.failure is None and threading.get_ident() == self.thread:
            try:
                self.note(function, *arguments)
            except UnrecordableError as error:
                self.failure = str(error)

    def _note_operation(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if func in _ALLOCATIONS:
            self.keep(result)
        elif not func._schema.is_mutable and _shares_memory(args, result):
            pass  # a view
        elif (emit := TORCH_CALLS.get(func)) is not None:
            emit(self, args, result)
        else:
            raise UnrecordableError(f"{func} is not a kernel")


_hearing: CallRecorder | None = None


def current_recorder() -> CallRecorder | None:
    """Return what records the step that this thread computes; None: it is not recorded."""
    if (recorder := _hearing) is None or threading.get_ident() != recorder.thread or recorder.is_exchanging:
        return None  # an exchange that is a part of another one is no part of the step
    return recorder


# A hook that was a closure of its recording was freed while another engine's call still ran, and that call's end
# crashed the process.
def _hook(result: object, function: Any, arguments: tuple[Any, ...]) -> object:
    """Report a call of a kernel. This object lives as long as the process: ctypes holds no reference to a hook while a
    call runs, and the call of another thread may end after its hook was taken away."""
    if (recorder := _hearing) is not None:
        recorder.hear(function, arguments)
    return result


@contextlib.contextmanager
def recording() -> Iterator[CallRecorder | None]:
    """Record the operations of this thread; None if another thread records at this moment."""
    global _hearing
    if not _recording.acquire(blocking=False):
        yield None
        return
    try:
        _hearing, hooked = CallRecorder(), list(_functions())
        for function in hooked:
            function.errcheck = _hook
        try:
            with _hearing:
                yield _hearing
        finally:
            _hearing = None
            for function in hooked:
                del function.errcheck
    finally:
        _recording.release()


def _functions() -> Iterator[Any]:
    for library in loaded_libraries():
        for value in vars(library).values():
            if isinstance(value, library._FuncPtr):
                yield value


def _content(tensor: Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _shares_memory(args: tuple[Any, ...], result: Any) -> bool:
    """Return whether every tensor of ``result`` lies in the memory of a tensor among ``args``."""
    known = {each.untyped_storage().data_ptr() for each in args if _has_memory(each)}
    results = result if isinstance(result, tuple | list) else [result]
    return all(_has_memory(each) and each.untyped_storage().data_ptr() in known for each in results)


def _has_memory(each: Any) -> bool:
    """Return whether this is a tensor; what oneDNN packed is none, seen from here."""
    return isinstance(each, Tensor) and each.layout is torch.strided

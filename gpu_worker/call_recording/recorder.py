"""Records what a step does while PyTorch computes it: each call of a kernel, and the memory that it takes meanwhile."""

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.library import loaded_libraries
from .calls import TORCH_CALLS, Entry, RankExchange, RecordedExchange, UnrecordableError, describe

_aten = torch.ops.aten
_ALLOCATIONS = frozenset((_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default))
_recording = threading.Lock()
"""Kernels have one hook each, so one step of a process is recorded at a time."""


class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of PyTorch as a dispatch mode, and the calls of kernels through their ``errcheck`` hooks.

    Only allocations, views and the operations of :data:`~.calls.TORCH_CALLS` may be among PyTorch's. After any
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
        self._thread = threading.get_ident()
        self._is_exchanging = False

    @property
    def hears_exchanges(self) -> bool:
        """Return whether an exchange that this thread begins now is a part of the step, and not of another exchange."""
        return threading.get_ident() == self._thread and not self._is_exchanging

    @classmethod
    # PyTorch wraps dispatch modes in a function that imports torch._dynamo: the first decode step took more than a
    # second.
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports PyTorch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.failure is None and not self._is_exchanging:
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

    def exchange(self, perform: Callable[[Tensor], object], tensor: Tensor, *, reads: bool, writes: bool) -> None:
        """Exchange a tensor with other ranks, and record it: the kernel that does it if one is called, otherwise
        ``perform``.

        Args:
            perform: Reads the tensor that it gets, overwrites it, or both. Each run of the recording calls it anew.
            tensor: On the CPU.
            reads: Whether the content of ``tensor`` before the exchange counts.
            writes: Whether the exchange changes ``tensor``.
        """
        before = _content(tensor) if reads else None
        num_calls = len(self.calls)
        self._is_exchanging = True
        try:
            perform(tensor)
        finally:
            self._is_exchanging = False
        if self.failure is not None:
            return
        if not tensor.is_contiguous() or len(self.calls) > num_calls + 1:
            self.failure = "an exchange of an odd tensor"
            return
        if len(self.calls) == num_calls:
            self.calls.append(RankExchange(perform, tensor))
        self.exchanged.append(
            RecordedExchange(num_calls, tensor.data_ptr(), before, _content(tensor) if writes else None)
        )

    def hear(self, function: Any, arguments: tuple[Any, ...]) -> None:
        """Note a call that a kernel's hook reports, if this thread made it."""
        if self.failure is None and threading.get_ident() == self._thread:
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
    return _hearing if _hearing is not None and _hearing.hears_exchanges else None


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

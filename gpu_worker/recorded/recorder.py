"""Records what a step does while PyTorch computes it: each call of a kernel, and the memory that it takes meanwhile."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..kernels.library import loaded_libraries
from .calls import Call, UnrecordableError, describe
from .torch_calls import TORCH_CALLS

_aten = torch.ops.aten
_ALLOCATIONS = frozenset((_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default))
_recording = threading.Lock()
"""Kernels have one hook each, so one step of a process is recorded at a time."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of PyTorch as a dispatch mode, and the calls of kernels through their ``errcheck`` hooks.

    Only allocations, views and the operations of :data:`~.torch_calls.TORCH_CALLS` may be among PyTorch's. After any
    other one :attr:`failure` names it; the step is computed to its end all the same.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.tensors: dict[int, Tensor] = {}
        """The memory that the step allocated, by address. The tensors keep it from being used twice."""
        self.failure: str | None = None
        self._thread = threading.get_ident()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports PyTorch's compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.failure is None:
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


_hearing: Recorder | None = None


def _hook(result: object, function: Any, arguments: tuple[Any, ...]) -> object:
    """Report a call of a kernel. This object lives as long as the process: ctypes holds no reference to a hook while a
    call runs, and the call of another thread may end after its hook was taken away."""
    if (recorder := _hearing) is not None:
        recorder.hear(function, arguments)
    return result


@contextlib.contextmanager
def recording() -> Iterator[Recorder | None]:
    """Record the operations of this thread; None if another thread records at this moment."""
    global _hearing
    if not _recording.acquire(blocking=False):
        yield None
        return
    try:
        _hearing, hooked = Recorder(), list(_functions())
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


def _shares_memory(args: tuple[Any, ...], result: Any) -> bool:
    """Return whether every tensor of ``result`` lies in the memory of a tensor among ``args``."""
    known = {each.untyped_storage().data_ptr() for each in args if _has_memory(each)}
    results = result if isinstance(result, tuple | list) else [result]
    return all(_has_memory(each) and each.untyped_storage().data_ptr() in known for each in results)


def _has_memory(each: Any) -> bool:
    """Return whether this is a tensor; what oneDNN packed is none, seen from here."""
    return isinstance(each, Tensor) and each.layout is torch.strided

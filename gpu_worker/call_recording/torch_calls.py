"""Replaces the operations of PyTorch that a decoder's step contains by kernels that compute the same bits."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.library import load_replay
from .calls import UnrecordableError

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


def _copy(calls: RecordedCalls, args: tuple[Any, ...], result: Tensor) -> None:
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
    _aten.contiguous.default: _copy,
    _aten.clone.default: _copy,
    _aten.copy_.default: _copy_into,
    _aten.to.dtype: _convert,
    _aten._to_copy.default: _convert,
    _aten.add_.Tensor: _add,
    _aten.mul_.Tensor: _scale,
}
"""Adds to a recording what an operation with these arguments and this result does."""

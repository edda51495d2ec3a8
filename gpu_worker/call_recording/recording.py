"""Holds a recorded step as the replaying kernel reads it, and places its intermediate results in little memory: those
that live at different times share it.

Each rank decides alone whether it runs a recording or computes a step as ever, because both make the same exchanges in
the same order. So the trial must make none: another rank may make no trial at this moment.
"""

import bisect
import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_int64, c_uint64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..kernels.library import load_replay
from .recorder import Call, Entry, RecordedExchange, UnrecordableError, describe

_ALIGNMENT = 64


@dataclass(slots=True)
class Buffer:
    """Holds where an intermediate result was while the step was recorded, and when it is used."""

    start: int
    nbytes: int
    first: int = -1
    """The first call that uses it; -1: none does."""
    last: int = -1
    offset: int = 0
    """Its place in the memory of all recordings."""


class Buffers:
    """Holds the buffers of one recording in the order of their addresses."""

    def __init__(self, tensors: Mapping[int, Tensor], calls: Sequence[Entry], results: Sequence[Tensor]) -> None:
        """``tensors``: those that the step allocated, by address. ``results`` live until the step's end."""
        self._buffers = [
            Buffer(start, tensor.untyped_storage().nbytes())
            for start, tensor in sorted(tensors.items())
            if tensor.untyped_storage().nbytes()
        ]
        self._starts = [buffer.start for buffer in self._buffers]
        for number, call in enumerate(calls):
            for address in call.addresses():
                if (buffer := self._find(address)) is not None:
                    buffer.first = number if buffer.first < 0 else buffer.first
                    buffer.last = number
        # Results live past the last call: they are read until the next step begins.
        for result in results:
            if (buffer := self._find(result.data_ptr())) is not None:
                buffer.first, buffer.last = max(buffer.first, 0), len(calls)
        self.nbytes = _place([buffer for buffer in self._buffers if buffer.first >= 0])
        """The size of the memory that the recording needs."""

    def moved(self, address: int, base: int) -> int:
        """Return where what was at ``address`` lies in the memory that begins at ``base``; elsewhere, the same."""
        buffer = self._find(address)
        return address if buffer is None else base + buffer.offset + address - buffer.start

    def view(self, tensor: Tensor, memory: Tensor) -> Tensor:
        """Return the place of a contiguous ``tensor`` of the recorded step in ``memory``."""
        offset = self.moved(tensor.data_ptr(), 0)
        return memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def holds(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an intermediate result, without gaps."""
        return tensor.is_contiguous() and self._find(tensor.data_ptr()) is not None

    def _find(self, address: int) -> Buffer | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._buffers[place].nbytes:
            return None
        return self._buffers[place]


def _place(buffers: list[Buffer]) -> int:
    """Choose the offsets: each at the lowest place that no other one has at the same time. Returns the size of all."""
    placed: list[Buffer] = []
    size = 0
    # A decoder's step needs few results at a time, so its memory stays in a cache where one buffer for each call would
    # not.
    for buffer in sorted(buffers, key=lambda each: each.first):
        placed = [other for other in placed if other.last >= buffer.first]
        buffer.offset = 0
        for other in sorted(placed, key=lambda each: each.offset):
            if buffer.offset + buffer.nbytes <= other.offset:
                break
            buffer.offset = max(buffer.offset, _aligned(other.offset + other.nbytes))
        placed.append(buffer)
        size = max(size, buffer.offset + buffer.nbytes)
    return _aligned(size)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


class SharedMemory:
    """Holds the memory in which every recording of a model computes, one at a time."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> bool:
        """Make room for a recording. Returns whether the memory moved, so that earlier recordings are of no use."""
        if nbytes <= len(self.bytes):
            return False
        self.bytes = torch.empty(max(nbytes, 2 * len(self.bytes)), dtype=torch.uint8)
        return True


class _RecordedCall(ctypes.Structure):
    """Mirrors the struct in ``replay.cpp``."""

    _fields_ = (("function", c_void_p), ("words", c_void_p), ("signature", c_int64))


class Recording:
    """Runs the calls of a step, in the memory that all recordings share.

    Attributes:
        results: The results of the step, which each run writes.
        structs: The arguments of calls that are structs; changes count from the next run on.
    """

    def __init__(self, calls: Sequence[Entry], buffers: Buffers, memory: Tensor, results: Sequence[Tensor]) -> None:
        """``results`` are tensors of the recorded step, whose places in ``memory`` become :attr:`results`.

        Raises :class:`UnrecordableError` for a kernel that the replaying one cannot call.
        """
        kernels, base = load_replay(), memory.data_ptr()
        self.results = [buffers.view(each, memory) for each in results]
        kept = [call for call in calls if isinstance(call, Call)]
        moved = [call.relocate(lambda address: buffers.moved(address, base)) for call in kept]
        self.structs = [call.args for call in moved if call.args is not None]
        self._words = [(c_uint64 * len(call.words))(*call.words) for call in moved]
        self._calls = (_RecordedCall * len(moved))()
        for place, call in enumerate(moved):
            signature = kernels.find_signature(call.letters.encode())
            if signature < 0:
                raise UnrecordableError(f"no signature {call.letters}")
            self._calls[place] = _RecordedCall(call.function, ctypes.addressof(self._words[place]), signature)
        self._parts = self._divide(calls, buffers, memory, kernels.replay)
        self._is_one_call = len(self._parts) == 1

    def _divide(
        self,
        calls: Sequence[Entry],
        buffers: Buffers,
        memory: Tensor,
        replay: Callable[[int, int], object],
    ) -> list[Callable[[], object]]:
        """Return what a run does, in order: all kernels up to an exchange with other ranks by one call, then that."""
        parts: list[Callable[[], object]] = []
        where, count = ctypes.addressof(self._calls), 0
        for call in [*calls, None]:
            if isinstance(call, Call):
                count += 1
                continue
            if count:
                parts.append(functools.partial(replay, where, count))
                where, count = where + count * ctypes.sizeof(_RecordedCall), 0
            if call is not None:
                if not all(map(buffers.holds, call.tensors)):
                    raise UnrecordableError("what ranks exchange is no tensor of the step")
                parts.append(functools.partial(call.perform, *(buffers.view(each, memory) for each in call.tensors)))
        return parts

    def run(self) -> None:
        """Compute the step anew from what its inputs hold now. Other Python code can run meanwhile."""
        if self._is_one_call:
            self._parts[0]()
            return
        with torch.inference_mode():  # the memory may not be written without
            for part in self._parts:
                part()


_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class DryRun:
    """Holds the calls of a recorded step in which no other rank takes part.

    Attributes:
        calls: The calls of the step; in the place of each exchange, one that keeps what this rank gave, and one that
            writes what the exchange left.
    """

    def __init__(self, calls: Sequence[Entry], exchanged: Sequence[RecordedExchange]) -> None:
        """``exchanged``: the exchanges among ``calls``, in order."""
        self._expected: list[bytes] = []
        self._given: list[_Bytes] = []
        self._left: list[_Bytes] = []
        self.calls: list[Entry] = []
        done = 0
        for each in exchanged:
            self.calls += [*calls[done : each.number], *self._replace(each)]
            done = each.number + 1
        self.calls += calls[done:]

    def was_right(self) -> bool:
        """Return whether the calls, which have run, gave the other ranks the same bits as the recorded step."""
        return all(given.tobytes() == expected for given, expected in zip(self._given, self._expected, strict=True))

    def _replace(self, each: RecordedExchange) -> list[Call]:
        calls = []
        # As strict as the trial of a lone rank: what this rank would have given to the others has to be the same bits
        # too.
        if each.before is not None:
            self._expected.append(each.before)
            self._given.append(np.zeros(len(each.before), dtype=np.uint8))
            calls.append(_copy(each.given, self._given[-1].ctypes.data, len(each.before)))
        if each.after is not None:
            self._left.append(np.frombuffer(each.after, dtype=np.uint8).copy())
            calls.append(_copy(self._left[-1].ctypes.data, each.left, len(each.after)))
        return calls


def _copy(source: int, target: int, nbytes: int) -> Call:
    return describe(load_replay().copy_rows, (source, nbytes, target, nbytes, 1, nbytes))

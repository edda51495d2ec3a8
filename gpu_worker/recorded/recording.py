"""Holds a recorded step as the replaying kernel reads it."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_uint64, c_void_p

from torch import Tensor

from ..kernels.library import load_replay
from .buffers import Buffers
from .calls import Call, UnrecordableError


class _RecordedCall(ctypes.Structure):
    """Mirrors the struct in ``replay.cpp``."""

    _fields_ = (("function", c_void_p), ("words", c_void_p), ("signature", c_int64))


class Recording:
    """Runs the calls of a step, in the memory that all recordings share.

    Attributes:
        results: The results of the step, which each run writes.
        structs: The arguments of calls that are structs; changes count from the next run on.
    """

    def __init__(self, calls: Sequence[Call], buffers: Buffers, memory: Tensor, results: Sequence[Tensor]) -> None:
        """``results`` are tensors of the recorded step, whose places in ``memory`` become :attr:`results`.

        Raises :class:`UnrecordableError` for a kernel that the replaying one cannot call.
        """
        kernels, base = load_replay(), memory.data_ptr()
        self.results = [buffers.view(each, memory) for each in results]
        moved = [call.relocate(lambda address: buffers.moved(address, base)) for call in calls]
        self.structs = [call.args for call in moved if call.args is not None]
        self._words = [(c_uint64 * len(call.words))(*call.words) for call in moved]
        self._calls = (_RecordedCall * len(moved))()
        for place, call in enumerate(moved):
            signature = kernels.find_signature(call.letters.encode())
            if signature < 0:
                raise UnrecordableError(f"no signature {call.letters}")
            self._calls[place] = _RecordedCall(call.function, ctypes.addressof(self._words[place]), signature)
        self._replay = kernels.replay
        self._where = ctypes.addressof(self._calls)
        self._count = len(moved)

    def run(self) -> None:
        """Compute the step anew from what its inputs hold now. Other Python code can run meanwhile."""
        self._replay(self._where, self._count)

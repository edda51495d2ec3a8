"""Tries a recording without the other ranks: what they would send is taken from the step that was recorded.

Each rank decides alone whether it runs a recording or computes a step as ever, because both make the same exchanges in
the same order. So the trial must make none: another rank may make no trial at this moment.
"""

from collections.abc import Sequence

import numpy as np

from ..kernels.library import load_replay
from .calls import Call, Entry, RecordedExchange, describe

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
            calls.append(_copy(each.address, self._given[-1].ctypes.data, len(each.before)))
        if each.after is not None:
            self._left.append(np.frombuffer(each.after, dtype=np.uint8).copy())
            calls.append(_copy(self._left[-1].ctypes.data, each.address, len(each.after)))
        return calls


def _copy(source: int, target: int, nbytes: int) -> Call:
    return describe(load_replay().copy_rows, (source, nbytes, target, nbytes, 1, nbytes))

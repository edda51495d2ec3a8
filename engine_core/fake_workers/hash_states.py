"""The states of the hash worker's layer that keeps one: a slot holds a hash of all tokens that were read.

A slot that is wrong, stale or written twice gives another hash, and so another token. With a chunk of several tokens
the hash depends on where prompts are cut, as the results of a chunked kernel do.
"""

import hashlib
from collections.abc import Mapping
from itertools import accumulate, groupby

import numpy as np
import numpy.typing as npt

from ..data.scheduler_output import SchedulerOutput, StateRun
from .hash_row import HashRow

STATE_BYTES = 16
_EMPTY = 0xEE
"""Each byte of a slot that holds nothing which a request may read."""
_ALONE = b"alone"
"""Marks a single token that follows a state, which kernels compute in another form than a chunk of one token."""


def hash_run(state: bytes, tokens: npt.NDArray[np.int32], chunk: int) -> bytes:
    """Return the state after ``tokens`` [n, 2], ids and positions, that follow ``state``; b"": there is none before."""
    form = _ALONE if len(tokens) == 1 and state else b""
    for start in range(0, len(tokens), chunk):
        piece = np.ascontiguousarray(tokens[start : start + chunk], dtype="<i4").tobytes()
        mark = form if chunk > 1 else b""
        state = hashlib.blake2b(state + mark + piece, digest_size=STATE_BYTES).digest()
    return state


class HashStates:
    """Holds the slots, of which each begins with a hash."""

    def __init__(self, chunk: int, nbytes: int = STATE_BYTES) -> None:
        """``chunk`` and ``nbytes``: as in ``ModelInfo.state_chunk`` and ``ModelInfo.state_bytes``."""
        self.chunk = chunk
        self.nbytes = nbytes
        self.slots: npt.NDArray[np.uint8] = np.empty((0, nbytes), dtype=np.uint8)
        """[num_slots, nbytes]."""
        self._last: dict[str, list[bytes]] = {}  # of each request of the step: after its last known token, and drafts

    def allocate(self, num_slots: int, memory: memoryview | None = None) -> None:
        """Make slots, which hold nothing that a request may read, in ``memory`` if it is given."""
        shape = (num_slots, self.nbytes)
        if memory is None:
            self.slots = np.empty(shape, dtype=np.uint8)
        else:
            self.slots = np.frombuffer(memory, dtype=np.uint8, count=num_slots * self.nbytes).reshape(shape)
        self.clear()

    def clear(self) -> None:
        """Let the slots hold nothing, where they lie: transports go on to serve that memory."""
        self.slots[:] = _EMPTY

    def of(self, row: HashRow, num_drafts: int = 0) -> bytes:
        """Return the state of a request of the latest step after the last token that was known, and so many drafts."""
        return self._last[row.req_id][num_drafts]

    def compute(self, step: SchedulerOutput, rows: Mapping[str, HashRow], cache: npt.NDArray[np.int32]) -> None:
        """Compute the runs of a step, whose tokens lie in the cache."""
        runs = {req_id: list(found) for req_id, found in groupby(step.state_runs, lambda run: run.req_id)}
        assert list(runs) == list(step.num_scheduled_tokens), "the runs are those of other requests"
        _check_apart(runs)
        for req_id, num_tokens in step.num_scheduled_tokens.items():
            row = rows[req_id]
            begin = row.num_computed - num_tokens
            assert (begin == 0) == (runs[req_id][0].read < 0), "a request begins from zero, and goes on from a state"
            states = list[bytes]()
            for run in runs[req_id]:
                tokens = cache[row.slots[begin : begin + run.num_tokens]]
                states += self._compute_run(run, tokens)
                begin += run.num_tokens
            assert begin == row.num_computed, "the runs have other tokens than the step"
            self._last[req_id] = states[-1 - len(step.draft_token_ids.get(req_id, [])) :]
        self._last = {req_id: self._last[req_id] for req_id in runs}

    def _compute_run(self, run: StateRun, tokens: npt.NDArray[np.int32]) -> list[bytes]:
        """Return the states after each chunk of a run."""
        state = self.slots[run.read, :STATE_BYTES].tobytes() if run.read >= 0 else b""
        if self.chunk == 1:
            states = list(accumulate(tokens, lambda state, token: hash_run(state, token[None], 1), initial=state))[1:]
        else:
            states = [hash_run(state, tokens, self.chunk)]
        self.slots[run.written, :STATE_BYTES] = np.frombuffer(states[-1], dtype=np.uint8)
        return states


def _check_apart(runs: Mapping[str, list[StateRun]]) -> None:
    """Check that the kernels may compute all requests at the same time: none touches what another one writes."""
    writers = {run.written: req_id for req_id, found in runs.items() for run in found}
    for req_id, found in runs.items():
        touched = {slot for run in found for slot in (run.read, run.written)}
        assert all(writers.get(slot, req_id) == req_id for slot in touched), "two requests share a slot that is written"

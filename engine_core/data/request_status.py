"""The states of a request inside the engine core, and which may follow which."""

import enum

from .messages import FinishReason


class RequestStatus(enum.IntEnum):
    """States of a request. Everything from ``FINISHED_STOPPED`` on is final."""

    WAITING = 0
    """The worker does not know it."""
    RUNNING = 1
    PREEMPTED = 2
    """It lost its blocks and waits again; the worker still knows its parameters."""
    WAITING_FOR_REMOTE_KVS = 3
    """It cannot be scheduled before blocks, or tokens, have arrived from another engine."""
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 4
    """The grammar of its output is being compiled. It is in no queue."""
    FINISHED_STOPPED = 16
    FINISHED_LENGTH_CAPPED = 17
    FINISHED_ABORTED = 18
    FINISHED_ERROR = 19
    FINISHED_PREFILLED = 20
    """The first token was drawn, and another engine continues the output."""
    FINISHED_REPETITION = 21
    """The output repeats itself."""


_Status = RequestStatus
_FINISHED = frozenset(status for status in _Status if status >= _Status.FINISHED_STOPPED)

# All legal changes. WAITING ends at once when accepted tokens meet an end condition or the request is refused; a failed
# step sends every request back to WAITING; PREEMPTED ends by a token of a step that was in flight at the time.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _Status.WAITING: _FINISHED
    | {_Status.RUNNING, _Status.WAITING_FOR_REMOTE_KVS, _Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR},
    _Status.RUNNING: _FINISHED | {_Status.PREEMPTED, _Status.WAITING},
    _Status.PREEMPTED: _FINISHED | {_Status.RUNNING, _Status.WAITING, _Status.WAITING_FOR_REMOTE_KVS},
    _Status.WAITING_FOR_REMOTE_KVS: _FINISHED | {_Status.WAITING, _Status.PREEMPTED},
    _Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FINISHED | {_Status.WAITING},
} | {status: frozenset() for status in _FINISHED}

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    _Status.FINISHED_STOPPED: FinishReason.STOP,
    _Status.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    _Status.FINISHED_ABORTED: FinishReason.ABORT,
    _Status.FINISHED_ERROR: FinishReason.ERROR,
    _Status.FINISHED_PREFILLED: FinishReason.PREFILLED,
    _Status.FINISHED_REPETITION: FinishReason.REPETITION,
}

"""A request inside the engine core: its tokens, how far they are computed, and its life from waiting to finished."""

import enum

from .messages import EngineCoreRequest, FinishReason


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything from ``FINISHED_STOPPED`` on is final."""

    WAITING = 0
    """The worker does not know it."""
    RUNNING = 1
    PREEMPTED = 2
    """Waits again: it lost its blocks, the worker still knows its parameters."""
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6


_Status = RequestStatus
_FINISHED = frozenset(status for status in _Status if status >= _Status.FINISHED_STOPPED)

# The only changes there are. WAITING ends at once when accepted tokens meet an end condition or the request is refused;
# a failed step sends everybody back to WAITING.
_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _Status.WAITING: _FINISHED | {_Status.RUNNING},
    _Status.RUNNING: _FINISHED | {_Status.PREEMPTED, _Status.WAITING},
    _Status.PREEMPTED: frozenset({_Status.RUNNING, _Status.WAITING, _Status.FINISHED_ABORTED, _Status.FINISHED_ERROR}),
} | {status: frozenset() for status in _FINISHED}

FINISH_REASONS: dict[RequestStatus, FinishReason] = {
    _Status.FINISHED_STOPPED: FinishReason.STOP,
    _Status.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    _Status.FINISHED_ABORTED: FinishReason.ABORT,
    _Status.FINISHED_ERROR: FinishReason.ERROR,
}


class Request:
    """Each step the scheduler lets ``num_computed_tokens`` catch up with ``num_tokens``; there is no other phase."""

    __slots__ = (
        "all_token_ids",
        "arrival_ns",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "first_output_sent",
        "first_scheduled_ns",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "prompt_token_ids",
        "request_id",
        "sampling_params",
        "status",
        "stop_token_ids",
    )

    def __init__(self, message: EngineCoreRequest, max_model_len: int, arrival_ns: int) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.status = RequestStatus.WAITING
        self.sampling_params = params
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.cache_salt = message.cache_salt

        self.prompt_token_ids = message.prompt_token_ids
        # Accepted tokens of earlier attempts are output like any other, so indices and limits need no second count.
        self.all_token_ids = message.prompt_token_ids + message.accepted_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        self.num_computed_tokens = 0

        # Kept by the KV cache manager.
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0

        self.num_cached_tokens = 0
        self.arrival_ns = arrival_ns
        self.first_scheduled_ns: int | None = None
        self.first_output_sent = False

    @property
    def num_output_tokens(self) -> int:
        """Accepted tokens of earlier attempts included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    def append_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.num_tokens += 1

    def set_status(self, status: RequestStatus) -> None:
        """The one place where a status changes."""
        assert status in _TRANSITIONS[self.status], f"{self.request_id}: {self.status.name} cannot become {status.name}"
        self.status = status


def finish_status(request: Request) -> RequestStatus | None:
    """Whether the newest output token ends the request, and how. A stop token wins over a limit."""
    if request.num_tokens > request.num_prompt_tokens and request.all_token_ids[-1] in request.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return RequestStatus.FINISHED_LENGTH_CAPPED
    return None

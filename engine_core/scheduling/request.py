"""A request inside the engine core: its tokens, how far they are computed, and its life from waiting to finished."""

import enum

from ..kv_transfer.kv_messages import KVTarget
from ..wire.embedding_rows import content_salt
from ..wire.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, Logprobs
from .repetition import is_repeating


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything from ``FINISHED_STOPPED`` on is final."""

    WAITING = 0
    """The worker does not know it."""
    RUNNING = 1
    PREEMPTED = 2
    """Waits again: it lost its blocks, the worker still knows its parameters."""
    WAITING_FOR_REMOTE_KVS = 3
    """Not to be scheduled before blocks, or tokens, have come from another engine."""
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = 4
    """In no queue: the grammar of its output is being compiled."""
    FINISHED_STOPPED = 16
    FINISHED_LENGTH_CAPPED = 17
    FINISHED_ABORTED = 18
    FINISHED_ERROR = 19
    FINISHED_PREFILLED = 20
    """The first token is there, and another engine goes on."""
    FINISHED_REPETITION = 21
    """The output repeats itself."""


_Status = RequestStatus
_FINISHED = frozenset(status for status in _Status if status >= _Status.FINISHED_STOPPED)

# The only changes there are. WAITING ends at once when accepted tokens meet an end condition or the request is refused;
# a failed step sends everybody back to WAITING; PREEMPTED ends by a token of a step that was in flight at the time.
_TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
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


class RemoteKVState:
    """A request's dealings with other engines; most requests have none."""

    __slots__ = (
        "awaits_tokens",
        "failure",
        "hits_lost",
        "lease_id",
        "num_external_tokens",
        "resume_status",
        "target",
        "wait_ns",
        "waiting_since_ns",
    )

    def __init__(self, lease_id: bytes = b"", target: KVTarget | None = None, *, awaits_tokens: bool = False) -> None:
        self.lease_id = lease_id
        """Prefill leg: what its KV is to be offered under."""
        self.target = target
        """Decode leg: where its KV is, until it is loaded or not wanted any more."""
        self.awaits_tokens = awaits_tokens
        self.num_external_tokens = 0
        """On their way, or loaded, after those that were found here."""
        self.failure = ""
        """Why it could not all be loaded: one of ``KV_FAILURES``."""
        self.hits_lost = False
        """What was found here counts for nothing any more."""
        self.resume_status = RequestStatus.WAITING
        """To go back to after waiting."""
        self.waiting_since_ns = 0
        self.wait_ns = 0


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
        "limit_status",
        "max_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_cached_tokens",
        "num_output_placeholders",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_tokens",
        "priority",
        "prompt_embeds",
        "prompt_logprobs",
        "prompt_token_ids",
        "remote",
        "repetition_detection",
        "request_id",
        "sampling_params",
        "skip_reading_prefix_cache",
        "status",
        "stop_token_ids",
    )

    def __init__(self, message: EngineCoreRequest, max_model_len: int, arrival_ns: int) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.status = RequestStatus.WAITING
        self.sampling_params = params
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.cache_salt = content_salt(message.cache_salt, message.prompt_embeds)
        self.prompt_embeds = message.prompt_embeds
        self.priority = message.priority

        self.prompt_token_ids = message.prompt_token_ids
        # Accepted tokens of earlier attempts are output like any other, so indices and limits need no second count.
        self.all_token_ids = message.prompt_token_ids + message.accepted_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        self.limit_status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.num_computed_tokens = 0
        """Counted when they are scheduled."""
        self.num_output_placeholders = 0
        """Output tokens that steps in flight are going to draw; the worker knows them before we do."""
        self.repetition_detection = params.repetition_detection

        self.remote: RemoteKVState | None = None
        if message.lease_id or message.remote_kv is not None or message.awaits_tokens:
            self.remote = RemoteKVState(message.lease_id, message.remote_kv, awaits_tokens=message.awaits_tokens)
        if message.lease_id and self.num_tokens + 1 < self.max_num_tokens:
            self.max_num_tokens = self.num_tokens + 1  # the rest is for whoever takes up the lease
            self.limit_status = RequestStatus.FINISHED_PREFILLED

        self.prompt_logprobs: Logprobs | None = None
        """So far, while any are to be told; whoever continues an output does not tell them again."""
        if params.prompt_logprobs is not None and not message.accepted_token_ids and not self.is_decode_leg:
            self.prompt_logprobs = Logprobs([], [])
        # What is not computed has no logits.
        self.skip_reading_prefix_cache = params.skip_reading_prefix_cache or self.prompt_logprobs is not None

        # Kept by the KV cache manager.
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0

        self.num_cached_tokens = 0
        self.num_external_cached_tokens = 0
        self.arrival_ns = arrival_ns
        self.first_scheduled_ns: int | None = None
        self.first_output_sent = False

    @property
    def is_decode_leg(self) -> bool:
        """Whether its KV, or its first tokens, are still to come from another engine."""
        return self.remote is not None and (self.remote.target is not None or self.remote.awaits_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Accepted tokens of earlier attempts included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """A copy."""
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def will_be_full(self) -> bool:
        """Whether the tokens in flight are the last that its limits allow."""
        return self.num_tokens + self.num_output_placeholders >= self.max_num_tokens

    @property
    def ends_with_stop_token(self) -> bool:
        return self.num_tokens > self.num_prompt_tokens and self.all_token_ids[-1] in self.stop_token_ids

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED_STOPPED

    @property
    def kv_wait_ns(self) -> int:
        """Time spent waiting for remote KV."""
        return self.remote.wait_ns if self.remote is not None else 0

    @property
    def is_known_to_worker(self) -> bool:
        status = self.status
        if status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            assert self.remote is not None
            status = self.remote.resume_status
        return status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED)

    def append_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.num_tokens += 1

    def set_status(self, status: RequestStatus) -> None:
        """The one place where a status changes."""
        assert status in _TRANSITIONS[self.status], f"{self.request_id}: {self.status.name} cannot become {status.name}"
        self.status = status


def finish_status(request: Request) -> RequestStatus | None:
    """Whether the newest output token ends the request, and how. A stop token comes before a limit."""
    if request.ends_with_stop_token:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return request.limit_status
    if request.repetition_detection is not None and is_repeating(
        request.all_token_ids, request.num_prompt_tokens, request.repetition_detection
    ):
        return RequestStatus.FINISHED_REPETITION
    return None


def mark_finished(output: EngineCoreOutput, request: Request, status: RequestStatus) -> None:
    """Makes ``output`` the request's last."""
    output.finish_reason = FINISH_REASONS[status]
    if output.finish_reason is FinishReason.STOP and request.ends_with_stop_token:
        output.stop_token_id = request.all_token_ids[-1]

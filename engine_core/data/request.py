"""Holds a request inside the engine core: its tokens, its states and which may follow which, its times, and what the KV
cache and its connectors know of it: its blocks and its KV on other engines."""

import enum
from collections.abc import Sequence
from typing import NamedTuple

from tokenloom.request.routed_rows import RoutedRows
from tokenloom.request.sampling_params import RepetitionDetectionParams

from .draft_counts import DraftHistory
from .embedding_rows import EmbedsSpan, MediaSpan, beside_salt
from .kv_messages import KVTarget
from .messages import EngineCoreOutput, EngineCoreRequest, FinishReason, Logprobs, RoutedExperts


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
    WAITING_FOR_ROWS = 5
    """Rows of its images are on their way, or have no room yet. It is in no queue and holds no blocks."""
    FINISHED_STOPPED = 16
    FINISHED_LENGTH_CAPPED = 17
    FINISHED_ABORTED = 18
    FINISHED_ERROR = 19
    FINISHED_PREFILLED = 20
    """The first token was sampled, and another engine continues the output."""
    FINISHED_REPETITION = 21
    """The output repeats itself."""


_Status = RequestStatus
_FINISHED = frozenset(status for status in _Status if status >= _Status.FINISHED_STOPPED)

# All legal changes. WAITING ends at once when accepted tokens meet an end condition or the request is refused; a failed
# step sends every request back to WAITING; PREEMPTED ends by a token of a step that was in flight at the time.
TRANSITIONS: dict[RequestStatus, frozenset[RequestStatus]] = {
    _Status.WAITING: _FINISHED
    | {
        _Status.RUNNING,
        _Status.WAITING_FOR_REMOTE_KVS,
        _Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        _Status.WAITING_FOR_ROWS,
    },
    _Status.RUNNING: _FINISHED | {_Status.PREEMPTED, _Status.WAITING},
    _Status.PREEMPTED: _FINISHED
    | {_Status.RUNNING, _Status.WAITING, _Status.WAITING_FOR_REMOTE_KVS, _Status.WAITING_FOR_ROWS},
    _Status.WAITING_FOR_REMOTE_KVS: _FINISHED | {_Status.WAITING, _Status.PREEMPTED},
    _Status.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR: _FINISHED | {_Status.WAITING},
    _Status.WAITING_FOR_ROWS: _FINISHED | {_Status.WAITING, _Status.PREEMPTED},
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
    """Holds what a request exchanges with other engines; most requests have none."""

    __slots__ = (
        "awaits_tokens",
        "failure",
        "hits_lost",
        "is_waiting",
        "lease_id",
        "num_bound",
        "num_external_tokens",
        "num_lent",
        "own_limit",
        "resume_status",
        "target",
        "wait_ns",
        "waiting_since_ns",
    )

    def __init__(self, lease_id: bytes = b"", target: KVTarget | None = None, *, awaits_tokens: bool = False) -> None:
        self.lease_id = lease_id
        """Prefill leg: the lease under which its KV is offered."""
        self.target = target
        """Decode leg: where its KV is, until it is loaded or no longer needed."""
        self.awaits_tokens = awaits_tokens
        self.num_external_tokens = 0
        """Tokens after the local hits that are being loaded, or were."""
        self.failure = ""
        """Why some could not be loaded: one of ``LEASE_ENDS``."""
        self.hits_lost = False
        """Whether the local hits became invalid meanwhile."""
        self.is_waiting = False
        """Whether the request waits for blocks or tokens of another engine now."""
        self.resume_status = RequestStatus.WAITING
        """The status to return to after waiting."""
        self.waiting_since_ns = 0
        self.wait_ns = 0
        self.num_lent = 0
        """While the request is handed over to another engine: how many tokens the lease covers, more than are known at
        first; 0: it is not."""
        self.num_bound = 0
        """With ``num_lent``: how many of them the lease names by their ids."""
        self.own_limit = 0
        """With ``num_lent``: ``max_num_tokens`` of the request, should it stay."""


class SessionReturn(NamedTuple):
    """Says when the next turn of a session is expected. ``branch``: its line of turns; ``began_ns``, ``due_ns``: when
    this turn arrived and when the next one is likely to, in nanoseconds on the clock of the arrivals; ``keep_ns``:
    until when the client wants its prompt kept, 0: it does not say."""

    branch: int
    began_ns: int
    due_ns: int
    keep_ns: int = 0


_NONE = frozenset[int]()


class RequestState:
    """Holds the slot of a request, which has the state after all of its computed tokens."""

    __slots__ = (
        *("draft_slot", "fork", "hit", "is_branch", "is_kept", "last", "lent_at", "lent_slot", "message", "num_drafts"),
        *("num_verifying", "slot"),
    )

    def __init__(self) -> None:
        self.slot = -1
        """-1: there is no state before the first token."""
        self.is_kept = True
        """Whether the slot must stay as it is, because it may be hit: the next step writes to another one."""
        self.draft_slot = -1
        """The slot that takes the state after the drafts of the step in work; -1: it has none."""
        self.num_drafts = 0
        """How many these are."""
        self.num_verifying = 0
        """How many steps in flight verify drafts, where they are planned before those are verified."""
        self.last = 0
        """After how many tokens of the prompt the last state is kept; 0: none is."""
        self.message = 0
        """The same of the message before the prompt's last one."""
        self.lent_slot = -1
        """The slot that takes the state after ``lent_at`` tokens, because another engine will read it; -1: none does,
        or it has it by now."""
        self.lent_at = 0
        self.hit = b""
        """The hash under which the state was found that the request began with; empty: it began from zero."""
        self.is_branch = False
        """Whether the request began where another prompt had gone on before, or from zero."""
        self.fork = 0
        """The number of tokens after which its prompt parts from others; 0: that is not known."""


class ParkedTokens(NamedTuple):
    """Says under which names a preempted request finds its blocks and its slot, until others need these."""

    num_tokens: int
    blocks: list[bytes]
    slot: bytes


# A record of its own, so that the KV cache, its connectors and their tests need nothing that schedules requests.
class RequestKV:
    """Holds the KV of one request. The KV cache manager maintains the blocks and their hashes."""

    __slots__ = (
        "all_token_ids",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "cross_block_ids",
        "first_kept_blocks",
        "lacks_cross",
        "media",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_external_cached_tokens",
        "num_prompt_tokens",
        "num_registered_blocks",
        "num_unverified",
        "parked",
        "prompt_embeds",
        "remote",
        "request_id",
        "reserved_block_ids",
        "routed_rows",
        "session",
        "skip_reading_prefix_cache",
        "state",
        "stop_token_ids",
    )

    def __init__(
        self,
        request_id: str,
        all_token_ids: list[int],
        cache_salt: bytes = b"",
        prompt_embeds: list[EmbedsSpan] | None = None,
        remote: RemoteKVState | None = None,
        routed_rows: RoutedRows | None = None,
        media: list[MediaSpan] | None = None,
    ) -> None:
        """``all_token_ids``: the request's own list, which grows with its output. ``routed_rows``: None if the request
        does not ask for experts."""
        self.request_id = request_id
        self.all_token_ids = all_token_ids
        self.num_prompt_tokens = len(all_token_ids)
        """The rest are tokens of the output, which were decoded, here or by another engine."""
        self.cache_salt = cache_salt
        self.prompt_embeds = prompt_embeds or []
        self.media = media or []
        """Its images, in order of position; most requests have none."""
        if media and media[0].is_beside:
            self.cache_salt = beside_salt(cache_salt, media[0].key)
        self.cross_block_ids: list[int] = []
        """The blocks with the keys and values of rows beside the prompt, in order; empty: it has none."""
        self.lacks_cross = False
        """Whether the next step writes these blocks, and needs the rows for it."""
        self.remote = remote
        self.routed_rows = routed_rows
        self.skip_reading_prefix_cache = False
        self.session: SessionReturn | None = None
        """When its blocks are likely to be hit after its end; None: nothing says so."""
        self.num_computed_tokens = 0
        """Counted when they are scheduled."""
        self.num_unverified = 0
        """How many of them are drafts of steps in flight, which may turn out wrong."""
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.first_kept_blocks: Sequence[int] = ()
        """For each KV group the first block of tokens that it still keeps; empty without groups."""
        self.reserved_block_ids: list[int] = []
        """Entries that will follow those of ``block_ids``, chosen early because another engine will read them."""
        self.num_cached_tokens = 0
        """Prompt tokens whose KV was found when the request was first scheduled."""
        self.num_external_cached_tokens = 0
        """The part of them that came from another engine or tier."""
        self.stop_token_ids: frozenset[int] = _NONE
        """They end messages in its prompt as they end its output."""
        self.parked: ParkedTokens | None = None
        """What it had computed when it was preempted, of a model whose layers keep a state."""
        self.state: RequestState | None = None
        """Its slot for the states of layers that keep one; None: it has none, or the model keeps no state."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        return len(self.all_token_ids)

    @property
    def is_decode_leg(self) -> bool:
        """Whether its KV, or its first tokens, will come from another engine."""
        return self.remote is not None and (self.remote.target is not None or self.remote.awaits_tokens)

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens that may come from a prefix cache: not the last one, whose logits are the next token, and none whose
        experts are still to be returned."""
        most = len(self.all_token_ids) - 1
        return most if self.routed_rows is None else min(most, self.routed_rows.end)

    @property
    def wait_ns(self) -> int:
        """Nanoseconds spent waiting for the KV of another engine."""
        return self.remote.wait_ns if self.remote is not None else 0


MAX_PREEMPTIONS = 64
"""How many preemptions the end of a request names."""


class RequestTimes:
    """Holds when a request arrived, may begin at the latest and began: nanoseconds on the clock of its arrival."""

    __slots__ = ("arrival_ns", "deadline_ns", "first_scheduled_ns", "preempted_at")

    def __init__(self, arrival_ns: int, timeout_ns: int = 0) -> None:
        """``timeout_ns``: 0: the request may begin at any time."""
        self.arrival_ns = arrival_ns
        self.deadline_ns = arrival_ns + timeout_ns if timeout_ns else 0
        """When the request may not begin any more; 0: never."""
        self.first_scheduled_ns: int | None = None
        self.preempted_at: tuple[int, ...] = ()
        """Output tokens that there were at each preemption: the first :data:`MAX_PREEMPTIONS` of them."""


# Slots instead of a dict: an engine holds thousands of these, and their attributes are read several times in every
# step.
class Request:
    """Holds the state of one request. Each step the scheduler lets ``kv.num_computed_tokens`` catch up with
    ``num_tokens``; there are no separate prefill and decode phases."""

    __slots__ = (
        "adapter",
        "all_token_ids",
        "draft_history",
        "first_output_sent",
        "is_constrained",
        "kv",
        "limit_status",
        "max_num_tokens",
        "num_output_placeholders",
        "num_passed",
        "num_prompt_tokens",
        "num_tokens",
        "pooling_params",
        "priority",
        "prompt_logprobs",
        "prompt_token_ids",
        "reasoning_start",
        "repetition_detection",
        "request_id",
        "resume_status",
        "routed_rows",
        "sampling_params",
        "status",
        "stop_token_ids",
        "tenant",
        "times",
    )

    def __init__(self, message: EngineCoreRequest, max_model_len: int, arrival_ns: int) -> None:
        params = message.sampling_params
        self.request_id = message.request_id
        self.status = RequestStatus.WAITING
        self.resume_status = RequestStatus.WAITING
        """The status to return to after waiting for rows."""
        self.sampling_params = params
        self.pooling_params = message.pooling_params
        self.is_constrained = params.structured_output is not None or params.thinking_token_budget is not None
        """Whether its output is followed token by token: it has a grammar, or its reasoning has a budget."""
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.priority = message.priority
        self.tenant = message.tenant
        self.adapter = message.adapter
        self.num_passed = 0
        """How many requests began before it because its adapter had no slot."""

        self.prompt_token_ids = message.prompt_token_ids
        self.reasoning_start = message.reasoning_start
        # Accepted tokens of earlier attempts are ordinary output, so indices and limits need no second count.
        self.all_token_ids = message.prompt_token_ids + message.accepted_token_ids
        self.num_prompt_tokens = len(message.prompt_token_ids)
        self.num_tokens = len(self.all_token_ids)
        self.max_num_tokens = min(self.num_prompt_tokens + params.max_tokens, max_model_len)
        if message.pooling_params is not None:  # even a prompt that fills the context has a result
            self.max_num_tokens = self.num_prompt_tokens + 1
        self.limit_status = RequestStatus.FINISHED_LENGTH_CAPPED
        self.num_output_placeholders = 0
        """Output tokens that steps in flight will sample; the worker knows them before the scheduler does."""
        self.repetition_detection = params.repetition_detection
        self.draft_history: DraftHistory | None = None
        """Which of its drafts were right; None before the first ones."""

        # The prefill leg samples one token: its logits exist with the last block, and the client has it before the KV
        # has moved. A request of one token needs no lease.
        lease_id = message.lease_id if self.num_tokens + 1 < self.max_num_tokens else b""
        if lease_id:
            self.max_num_tokens = self.num_tokens + 1  # the engine that takes up the lease samples the rest
            self.limit_status = RequestStatus.FINISHED_PREFILLED

        # None: the request does not ask for them.
        # vLLM keeps experts by KV slot, which is wrong for blocks of another engine or of the offload tier. No prefix
        # cache holds them here, so tokens whose experts are asked for are computed.
        self.routed_rows = RoutedRows(params.routed_experts_prompt_start) if params.return_routed_experts else None
        remote = None
        if lease_id or message.remote_kv is not None or message.awaits_tokens:
            remote = RemoteKVState(lease_id, message.remote_kv, awaits_tokens=message.awaits_tokens)
        self.kv = RequestKV(
            message.request_id,
            self.all_token_ids,
            message.cache_salt,
            message.prompt_embeds,
            remote,
            self.routed_rows,
            message.media,
        )
        self.kv.stop_token_ids = self.stop_token_ids
        self.kv.num_prompt_tokens = self.num_prompt_tokens
        """What the KV cache and its connectors know of it."""

        self.prompt_logprobs: Logprobs | None = None
        """Those computed so far, until they are sent; an attempt that continues an output does not send them again."""
        if params.prompt_logprobs is not None and not message.accepted_token_ids and not self.kv.is_decode_leg:
            self.prompt_logprobs = Logprobs([], [])
        # A prompt token that is not computed has no logits.
        self.kv.skip_reading_prefix_cache = params.skip_reading_prefix_cache or self.prompt_logprobs is not None

        if message.session is not None:
            turn = message.session
            keep_ns = arrival_ns + turn.keep_ns if turn.keep_ns else 0
            self.kv.session = SessionReturn(turn.branch, arrival_ns, arrival_ns + turn.return_ns, keep_ns)

        self.times = RequestTimes(arrival_ns, message.timeout_ns)
        self.first_output_sent = False

    @property
    def num_output_tokens(self) -> int:
        """Accepted tokens of earlier attempts included."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are not scheduled yet: known ones, and ones that the worker will have sampled by then."""
        return self.num_tokens + self.num_output_placeholders - self.kv.num_computed_tokens

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
    def is_known_to_worker(self) -> bool:
        status = self.status
        if status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            assert self.kv.remote is not None
            status = self.kv.remote.resume_status
        elif status is RequestStatus.WAITING_FOR_ROWS:
            status = self.resume_status
        return status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED)

    def append_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        self.num_tokens += 1

    def take_prompt_logprobs(self, start: int, num_tokens: int, part: Logprobs) -> Logprobs | None:
        """Add the prompt log probabilities of a chunk, whose ``num_tokens`` tokens begin at ``start``.

        Returns all of them when the prompt is complete. A part that neither begins the prompt nor follows the parts so
        far was computed before a preemption, and is dropped.
        """
        if self.prompt_logprobs is None:
            return None
        if start == 0:
            self.prompt_logprobs = part
        elif start == len(self.prompt_logprobs.sampled):
            self.prompt_logprobs.extend(part)
        if start + num_tokens != self.num_prompt_tokens:
            return None
        # They leave once and complete, with the first token: a request may resume, or go on in a decode engine, after
        # it. Until then it has to compute its whole prompt, so it skips cached blocks, and may read them again now.
        whole, self.prompt_logprobs = self.prompt_logprobs, None
        self.kv.skip_reading_prefix_cache = bool(self.sampling_params.skip_reading_prefix_cache)
        return whole

    def take_routed_experts(self) -> RoutedExperts | None:
        """Return the experts of the tokens computed since the last call, and forget them; None: there are none."""
        rows = self.routed_rows
        if rows is None or rows.start == rows.end:
            return None
        part = RoutedExperts(rows.start, rows.num_layers, rows.top_k, rows.id_bytes, rows.expert_ids)
        rows.drop()
        return part

    def set_status(self, status: RequestStatus) -> None:
        """Change the status; no other code does."""
        assert status in TRANSITIONS[self.status], f"{self.request_id}: {self.status.name} cannot become {status.name}"
        self.status = status


def finish_status(request: Request) -> RequestStatus | None:
    """Return how the newest output token ends the request, or None. A stop token takes precedence over a limit."""
    # As `ends_with_stop_token` says; written out because this runs for every token.
    if request.num_tokens > request.num_prompt_tokens and request.all_token_ids[-1] in request.stop_token_ids:
        return RequestStatus.FINISHED_STOPPED
    if request.num_tokens >= request.max_num_tokens:
        return request.limit_status
    if (
        request.repetition_detection is not None
        and request.num_output_tokens >= request.sampling_params.min_tokens
        and is_repeating(request.all_token_ids, request.num_prompt_tokens, request.repetition_detection)
    ):
        return RequestStatus.FINISHED_REPETITION
    return None


def is_repeating(token_ids: Sequence[int], start: int, detection: RepetitionDetectionParams) -> bool:
    """Return whether ``token_ids[start:]`` ends with one pattern, repeated as often as ``detection`` forbids."""
    num_tokens = len(token_ids) - start
    longest = min(detection.max_pattern_size, num_tokens // detection.min_count)
    for size in range(detection.min_pattern_size, longest + 1):
        # The first comparison rejects most sizes; a tail repeats a pattern of this size if it equals itself shifted.
        if token_ids[-1] == token_ids[-1 - size]:
            tail = token_ids[-size * detection.min_count :]
            if tail[size:] == tail[:-size]:
                return True
    return False


def mark_finished(output: EngineCoreOutput, request: Request, status: RequestStatus) -> None:
    """Make ``output`` the last of the request."""
    output.finish_reason = FINISH_REASONS[status]
    if request.draft_history is not None:
        output.drafts = request.draft_history.counts
    if output.finish_reason is FinishReason.STOP and request.ends_with_stop_token:
        output.stop_token_id = request.all_token_ids[-1]
    output.preempted_at = request.times.preempted_at

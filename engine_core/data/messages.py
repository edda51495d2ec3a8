"""Messages between an engine core and its client: plain msgspec structs, the same in process and over a socket."""

import enum
from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from ..wire.frames import from_raw
from .core_params import CorePoolingParams, CoreSamplingParams
from .draft_counts import DraftCounts, SpecDecodingStats
from .embedding_rows import EmbedsSpan, MediaSpan, RowsKey
from .errors import UtilityError
from .kv_events import KVCacheEvent
from .kv_messages import KVTarget
from .lora import LoraState


class FinishReason(enum.IntEnum):
    """Reasons why a request ended (values as in vLLM V1)."""

    STOP = 0
    """A token of ``stop_token_ids`` was produced."""
    LENGTH = 1
    """``max_tokens`` or the context length was reached."""
    ABORT = 2
    """The client aborted it."""
    ERROR = 3
    """It failed; a retry may succeed."""
    REPETITION = 4
    """The repetition detector ended it."""
    PREFILLED = 5
    """The prompt is computed and its KV is held under a lease (not part of vLLM)."""


class ErrorKind(enum.IntEnum):
    """Kinds of errors that are not the request's fault."""

    UNAVAILABLE = 0
    """A retry may succeed at once, on this engine or another one."""
    INTERNAL = 1
    """The engine could not compute the request, and neither could another one of its kind."""
    ENGINE_FULL = 2
    """The engine is at a limit; a retry may succeed later."""
    TENANT_FULL = 3
    """The request's tenant is at a limit of its own on this engine; a retry may succeed later."""
    DEADLINE_EXCEEDED = 4
    """The request's time ran out before it began."""
    LEAVING = 5
    """The engine shuts down, or cannot compile the request's grammar now; another one may take the request."""
    NO_ADAPTER = 6
    """The request's LoRA adapter is not loaded here; another engine may have it."""
    QUERY_LOST = 7
    """The engine does not hold the query that a document is scored against; the caller sends the query again."""
    LACKS = 8
    """The request needs what this kind of engine does not do; an engine of another kind may."""


class RequestType(enum.Enum):
    """Types of messages from a client to the core: the first frame of each (bytes as in vLLM V1)."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    """Another rank of the data-parallel group has begun the wave of this number."""
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"
    ACCEPT = b"\x06"
    """Tokens of the prefill leg, for a request that was added before them (not part of vLLM)."""
    GROUP = b"\x07"
    """Within the core: a message of the data-parallel group, or None when it is lost (not part of vLLM)."""
    ROWS = b"\x08"
    """Rows of an image that the core has asked for (not part of vLLM)."""


class SessionTurn(msgspec.Struct, array_like=True, gc=False):
    """Says when the next prompt that begins with this one is expected."""

    branch: int
    """Stands for the line of turns; the coordinator gives the numbers."""
    return_ns: int
    """Nanoseconds from its arrival until that of the next turn; 0: it may come at any time."""
    keep_ns: int = 0
    """Nanoseconds from its arrival for which the client wants its prompt kept; 0: it does not say."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Describes a new request, or one more attempt at it."""

    request_id: str
    """The key that the core's client chose; never one that a user chose."""
    prompt_token_ids: list[int]
    sampling_params: CoreSamplingParams
    accepted_token_ids: list[int] = []
    """Output tokens of earlier attempts; indices, limits, penalties and random numbers include them."""
    priority: int = 0
    """Requests with lower values run first; always 0 unless the scheduling policy is ``priority``."""
    cache_salt: bytes = b""
    """Part of every block hash of this request: requests with different salts never share blocks."""
    lease_id: bytes = b""
    """Prefill leg: offers the KV under this lease; the request ends as PREFILLED after its first token."""
    remote_kv: KVTarget | None = None
    """Decode leg: where to load the KV of the first ``num_tokens`` tokens from."""
    awaits_tokens: bool = False
    """Decode leg, added while the prefill runs: the request is not scheduled before an AcceptTokens."""
    resumable: bool = False
    """Whether this is an input of a session. More inputs may follow under the same id; each is answered with a turn
    that has its own finish reason. The last input is not resumable; without a prompt it only closes the session."""
    arrival_ns: int = 0
    """Arrival on the core's clock; set by the core's input thread, never by a client. 0 means when it is added."""
    prompt_embeds: list[EmbedsSpan] = []
    """Spans in order and without overlap, over prompt tokens only."""
    tenant: str = ""
    """Waiting requests share seats and grammar compilers fairly between tenants. "" is a tenant like any other."""
    timeout_ns: int = 0
    """How long after its arrival the request may still begin, or begin again; 0: at any time. The caller ends requests
    that run."""
    adapter: bytes = b""
    """The digest of a LoRA adapter; empty: the base model. The caller mixes it into ``cache_salt``."""
    pooling_params: CorePoolingParams | None = None
    """The request is pooled instead of generating tokens; its ``sampling_params`` are ``DRAWS_NOTHING``."""
    reasoning_start: int = 0
    """How the prompt leaves the reasoning: a value of ``ReasoningStart``."""
    session: SessionTurn | None = None
    """Which turn of a session it is: its blocks are kept for the next one. None: it is of none."""
    media: list[MediaSpan] = []
    """Images and sounds in order of position, without overlap, over prompt tokens only; the rows come later."""
    is_traced: bool = False
    """Whether ``EngineCoreOutputs.step_spans`` has its steps, if the core traces any."""
    packed_prompt: bytes = b""
    """In place of ``prompt_token_ids``: the ids of a long prompt as little-endian 32-bit numbers. They become integers
    when the request is added to the core."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids) or len(self.packed_prompt) // 4

    def listed_prompt(self) -> list[int]:
        """Return the ids of the prompt, packed or not."""
        return np.frombuffer(self.packed_prompt, "<u4").tolist() if self.packed_prompt else self.prompt_token_ids


class AcceptTokens(msgspec.Struct, array_like=True, gc=False):
    """Carries the tokens of the prefill leg to a request that was added with ``awaits_tokens``."""

    request_id: str
    token_ids: list[int]


class RowsWanted(msgspec.Struct, array_like=True, gc=False):
    """Asks the client for the rows of an image. A client that cannot get them aborts the request."""

    request_id: str
    """One of those that need them; the others are named too."""
    key: RowsKey
    number: int
    """Of this asking: rows that were freed, or given up, meanwhile are asked for under another one."""


class ArrivedRows(msgspec.Struct, array_like=True, gc=False):
    """Brings consecutive rows of an image that the core has asked for, each after the one before it. What nothing waits
    for any more is dropped."""

    key: RowsKey
    number: int
    """As in :class:`RowsWanted`."""
    first_row: int
    rows: npt.NDArray[np.float32]
    """[n, levels * hidden_size] finite numbers."""


class PrefillStats(msgspec.Struct, array_like=True, gc=False):
    """Describes the prefill of a request; sent with its first output."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    queued_ns: int
    """From arrival at the core until first scheduled."""
    prefill_ns: int
    """From first scheduled until the first token."""
    num_external_cached_tokens: int = 0
    """The part of ``num_cached_tokens`` whose KV came from another engine or tier; the rest was in the pool."""


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Holds natural log probabilities of n positions in columns, from the model's distribution before penalties, bias,
    masks and temperature (as in vLLM's ``raw_logprobs``)."""

    sampled: list[float]
    """[n] log probability of the sampled token, or of the prompt's token."""
    rank: list[int]
    """[n] rank of that token; 1 is the most likely."""
    top: int = 0
    """k: alternatives per position."""
    token_ids: list[int] = []
    """[n * k] the most likely tokens first (the lower id among equals), then those that the request names."""
    logprobs: list[float] = []
    """[n * k]"""

    def extend(self, following: "Logprobs") -> None:
        """Append the positions that follow; they must have the same number of alternatives."""
        self.sampled += following.sampled
        self.rank += following.rank
        self.token_ids += following.token_ids
        self.logprobs += following.logprobs
        self.top = following.top

    def first(self, count: int) -> "Logprobs":
        """Return the first ``count`` positions."""
        if count >= len(self.sampled):
            return self
        listed = count * self.top
        return Logprobs(
            self.sampled[:count], self.rank[:count], self.top, self.token_ids[:listed], self.logprobs[:listed]
        )

    def positions(self) -> Iterator["Logprobs"]:
        """Yield each position on its own."""
        for position, (sampled, rank) in enumerate(zip(self.sampled, self.rank, strict=True)):
            of_this = slice(position * self.top, (position + 1) * self.top)
            yield Logprobs([sampled], [rank], self.top, self.token_ids[of_this], self.logprobs[of_this])


class RoutedExperts(msgspec.Struct, array_like=True, gc=False):
    """Holds which experts computed consecutive tokens of a request."""

    start: int
    """Position of the first token, counted over prompt and output."""
    num_layers: int
    """Layers that have experts."""
    top_k: int
    """Experts of a token in each of these layers."""
    id_bytes: int
    """Bytes of an expert's number, 1 or 2."""
    expert_ids: bytes
    """[n, num_layers, top_k] numbers of experts, little-endian."""


class ExpertBalance(msgspec.Struct, array_like=True, gc=False):
    """Describes how experts were moved between ranks by their load."""

    balancedness: float
    """The mean load of the ranks divided by that of the busiest one, before the latest plan; 0 before any."""
    num_plans: int
    """Plans made so far."""
    num_moved: int
    """Experts that the rank which reports has taken over from others so far."""


class ExpertLoads(msgspec.Struct, array_like=True, gc=False):
    """Describes how tokens were spread over the experts of a model since it was loaded."""

    tokens: list[int]
    """[num_experts] tokens that each expert computed, over all layers."""
    imbalance: list[float]
    """[num_layers] the most tokens of one expert of the layer, divided by the mean of its experts; 0 before any."""
    balance: ExpertBalance | None = None
    """None: experts stay where they are."""


class LogitsStats(msgspec.Struct, array_like=True, gc=False):
    """Describes the model's own logits of one row, before any were changed, and how a token was sampled from them."""

    max: float
    min: float
    entropy: float
    """Of the distribution that they stand for, in nats."""
    temperature: float
    """That of the request; 0: greedy."""


class EngineCoreEventType(enum.IntEnum):
    """Types of scheduler events of a request (as in vLLM V1)."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """Describes a scheduler event with its time on the core's monotonic clock."""

    type: EngineCoreEventType
    timestamp_ns: int


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Holds what one step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    token_index: int = 0
    """Index in the whole output (accepted tokens included) of the first of ``new_token_ids``."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prefill_stats: PrefillStats | None = None
    error: str = ""
    """The error message with ``FinishReason.ERROR``; may be shown to clients."""
    kv_granted_tokens: int = 0
    """Prefill leg, once when first scheduled, and a running request when it is lent: the number of tokens that the
    lease covers."""
    kv_wait_ns: int = 0
    """Decode leg, with the first output: the time spent waiting for remote KV."""
    new_logprobs: Logprobs | None = None
    """Log probabilities of ``new_token_ids``, if the request asks for them."""
    new_prompt_logprobs: Logprobs | None = None
    """Log probabilities of the prompt without its first token; sent once, with or before the first output token."""
    num_nans_in_logits: int = 0
    """Number of NaN logits in the rows that ``new_token_ids`` were sampled from; 0 unless they are counted."""
    events: list[EngineCoreEvent] = []
    """Scheduler events since the request's last output; only if events are logged."""
    error_field: str = ""
    """With ``error``: the wrong field of the request. A retry would fail again."""
    logits_stats: LogitsStats | None = None
    """Statistics of the logits that the last of ``new_token_ids`` was sampled from, in steps that are measured."""
    error_kind: ErrorKind = ErrorKind.UNAVAILABLE
    """With ``error``, unless ``error_field`` says that the request is wrong."""
    drafts: DraftCounts | None = None
    """With ``finish_reason``: the request's drafts; None if it had none."""
    routed_experts: RoutedExperts | None = None
    """Those of the tokens computed since the request's last output, if the request asks for them."""
    pooled: npt.NDArray[np.float32] | None = None
    """The result of a pooling request: [], [n] or [tokens, n]."""
    preempted_at: tuple[int, ...] = ()
    """With ``finish_reason``: output tokens that the request had at each preemption, the first ones of many."""
    is_kept: bool = False
    """A running request that was lent is not any more: it goes on here."""
    cpu_ns: int = 0
    """CPU time of the core's processes for the request so far; 0 unless the core bills it."""


PREEMPTED_OUTCOMES = ("kept", "loaded", "computed")
"""Where a preempted request finds the state that it had: in memory, in the offload file, or nowhere, so that its tokens
are computed again."""


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """Describes the scheduler after a step; counters grow over the life of the core."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    """Tokens of waiting requests that are not computed yet."""
    kv_usage: float = 0.0
    """Share of blocks held by requests, in [0, 1]; of slots for states, if that is more."""
    num_free_blocks: int = 0
    num_free_state_slots: int = 0
    """Slots for states that no request has, those included that keep states of prompts."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up (counter); a preempted request is not counted again."""
    prefix_cache_hits: int = 0
    """Prompt tokens found in the pool (counter)."""
    num_preemptions: int = 0
    """Counter."""
    kv_blocks_received: int = 0
    """Counter: blocks loaded from other engines and found valid."""
    kv_bytes_received: dict[str, int] = {}
    """Counters by transport."""
    kv_recomputes: dict[str, int] = {}
    """Counters of requests whose remote KV was not used, by reason (``KV_FAILURES``)."""
    num_leases: int = 0
    """Leases held now."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens, not found in the pool, that were looked up in another engine or tier (counter)."""
    external_prefix_cache_hits: int = 0
    """The part of those tokens that was loaded (counter)."""
    num_prefilled_requests: int = 0
    """Requests whose prompt was computed: they have their first token (counter)."""
    num_prefilled_tokens: int = 0
    """Prompt tokens of those requests, cached ones included (counter)."""
    num_computed_tokens: int = 0
    """Tokens of all steps, of prompts and of answers (counter)."""
    num_prefilling_tokens: int = 0
    """Prompt tokens of running requests that are not computed yet."""
    spec_decoding: SpecDecodingStats | None = None
    """None unless the engine speculates."""
    loras: list[LoraState] | None = None
    """The LoRA adapters, by name; None if nothing has changed since they were reported."""
    num_waiting_for_rows: int = 0
    """The part of ``num_waiting`` that waits for rows of images."""
    rows_bytes: int = 0
    """Bytes of the rows of images that are here or on their way."""
    rows_items_asked: int = 0
    """Counter: images whose rows were asked for; one that was computed and is needed again counts again."""
    rows_items_received: int = 0
    """Counter: images whose rows came and were needed."""
    rows_bytes_received: int = 0
    """Counter."""
    preempted_states: dict[str, int] = {}
    """Counters of preempted requests that began again where layers keep a state, by ``PREEMPTED_OUTCOMES``."""


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """Calls one of the core's utilities by name."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answers a UTILITY call."""

    call_id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""

    def value(self) -> object:
        """Return what the utility returned. Raises ``UtilityError`` when it failed."""
        if self.error:
            raise UtilityError(self.error)
        return from_raw(self.result)


class GroupState(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Describes where a rank of a data-parallel group stands (see ``waves``)."""

    size: int
    """Ranks of the group; 0 before this one is a member."""
    is_member: bool
    """Whether this rank belongs to the group: not while it waits to be admitted, nor after it was removed."""
    start_wave: int | None
    """The wave that this rank has begun, so that the others must begin it too; None at rest."""
    wave_complete: int | None
    """The last wave that has ended; None before the first."""


class StepSpan(msgspec.Struct, array_like=True, gc=False):
    """Describes the part that a request had in one step. Times are those of the core's monotonic clock."""

    is_prefill: bool
    """Whether it computed a chunk of the prompt, otherwise the token after the last one."""
    began_ns: int
    """When the step was planned and its computation began."""
    ended_ns: int
    """When its result was there."""
    schedule_ns: int
    """How long planning it took, which ended when it began."""
    num_tokens: int
    """Tokens of the request that it computed."""
    batch_requests: int
    batch_tokens: int
    forward_ns: int = 0
    """The worker's forward pass, which began with the step; 0: not measured."""
    sample_ns: int = 0
    """The worker's sampling; 0: not measured."""


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Holds everything that one step produced for one client."""

    step: int = 0
    """Steps executed so far; a value that does not grow shows that the loop hangs."""
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    utility_output: UtilityOutput | None = None
    kv_events: list[KVCacheEvent] = []
    """Changes of the prefix cache since the last step, if they are published."""
    num_requests_added: int = 0
    """ADDs that the core has received: the statistics cover these requests."""
    expert_loads: ExpertLoads | None = None
    """After the latest step, of a model with experts."""
    group: GroupState | None = None
    """When it has changed, in a group that computes in waves."""
    rows_wanted: list[RowsWanted] = []
    """Rows of images that requests wait for; each is asked for once by each of them."""
    step_spans: dict[str, list[StepSpan]] = {}
    """Of requests that ended and are traced: steps that computed them, by their ids."""
    cpu_ns: dict[str, int] = {}
    """CPU time of the core's processes so far, by tenant, if the core bills it: from time to time, and when no request
    is left. What no tenant has caused is that of ``OVERHEAD``."""

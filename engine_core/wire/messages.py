"""What crosses between an engine core and its client: plain msgspec structs, the same in process and over ZMQ."""

import enum

import msgspec

from ..config import EngineConfig
from ..errors import UtilityError
from ..kv_cache.kv_events import KVCacheEvent
from ..kv_transfer.kv_messages import KVTarget
from .array_arena import ArenaAddress
from .core_sampling_params import SamplingParams
from .embedding_rows import EmbedsSpan
from .serialization import from_raw


class FinishReason(enum.IntEnum):
    """Why a request ended (values as in vLLM V1)."""

    STOP = 0
    """A token of ``stop_token_ids`` was produced."""
    LENGTH = 1
    """``max_tokens`` or the context length was reached."""
    ABORT = 2
    """The client ended it."""
    ERROR = 3
    """It failed; trying again may help."""
    REPETITION = 4
    """The repetition detector cut it."""
    PREFILLED = 5
    """The prompt is computed and its KV held under a lease (ours, not vLLM's)."""


class RequestType(enum.Enum):
    """First frame of every message from a client to the core (bytes as in vLLM V1)."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    WAKEUP = b"\x05"
    ACCEPT = b"\x06"
    """Ours: tokens of the prefill leg for a request that was added ahead of them."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One new request (or one more attempt at it)."""

    request_id: str
    """The client's own key; never one that a user chose."""
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    accepted_token_ids: list[int] = []
    """Output tokens of earlier attempts: indices, limits, penalties and random numbers count them."""
    priority: int = 0
    """Lower runs first; other than 0 only with the scheduling policy ``priority``."""
    cache_salt: bytes = b""
    """Part of every block hash of this request; requests of different salts never share blocks."""
    lease_id: bytes = b""
    """Prefill leg: offer the KV under this lease when first scheduled, end as PREFILLED after the first token."""
    remote_kv: KVTarget | None = None
    """Decode leg: where the KV of the first ``num_tokens`` tokens is."""
    awaits_tokens: bool = False
    """Decode leg, added while the prefill still runs: not to be scheduled before an AcceptTokens."""
    resumable: bool = False
    """An input of a session: more may follow under the same id, each answered with a turn that ends with a finish
    reason of its own. The last one is not resumable; without a prompt it only closes the session."""
    arrival_ns: int = 0
    """Set by the core's own input thread, never by a client: when it came, on the core's clock. 0: when it is added."""
    prompt_embeds: list[EmbedsSpan] = []
    """In order, without overlap; they cover prompt tokens only."""


class AcceptTokens(msgspec.Struct, array_like=True, gc=False):
    """Tokens that the prefill leg produced, for a request added with ``awaits_tokens``."""

    request_id: str
    token_ids: list[int]


class PrefillStats(msgspec.Struct, array_like=True, gc=False):
    """Sent with a request's first output."""

    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache."""
    queued_ns: int
    """From arrival at the core until first scheduled."""
    prefill_ns: int
    """From first scheduled until the first token."""
    num_external_cached_tokens: int = 0
    """Of ``num_cached_tokens``, those whose KV another engine or tier had; the rest was in the pool."""


class Logprobs(msgspec.Struct, array_like=True, gc=False):
    """Natural log probabilities of n positions, in columns, of the model's own distribution (before penalties, bias,
    masks and temperature, as in vLLM's ``raw_logprobs``)."""

    sampled: list[float]
    """[n] of the token taken (of a prompt: of the token that stands there)."""
    rank: list[int]
    """[n] of that token; 1 is the best."""
    top: int = 0
    """k: alternatives at each position."""
    token_ids: list[int] = []
    """[n * k] the best, best first (among equals the lower id), then those that the request names."""
    logprobs: list[float] = []
    """[n * k]"""

    def extend(self, following: "Logprobs") -> None:
        """Adds the positions that follow; they tell as many alternatives."""
        self.sampled += following.sampled
        self.rank += following.rank
        self.token_ids += following.token_ids
        self.logprobs += following.logprobs
        self.top = following.top


class EngineCoreEventType(enum.IntEnum):
    """What befell a request in the scheduler (as in vLLM V1)."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """One of them, with its time on the core's monotonic clock."""

    type: EngineCoreEventType
    timestamp_ns: int


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step produced for one request."""

    request_id: str
    new_token_ids: list[int]
    token_index: int = 0
    """Index in the whole output (accepted tokens included) of the first of ``new_token_ids``."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    prefill_stats: PrefillStats | None = None
    error: str = ""
    """With ``FinishReason.ERROR``; fit for a client."""
    kv_granted_tokens: int = 0
    """Prefill leg, once, when first scheduled: tokens that the lease covers."""
    kv_wait_ns: int = 0
    """Decode leg, with the first output: time spent waiting for remote KV."""
    new_logprobs: Logprobs | None = None
    """Of ``new_token_ids``, when asked for."""
    new_prompt_logprobs: Logprobs | None = None
    """Of the whole prompt but its first token, once, with or before the first output token."""
    num_nans_in_logits: int = 0
    """NaN logits of the rows that ``new_token_ids`` were drawn from; 0 unless they are counted."""
    events: list[EngineCoreEvent] = []
    """What befell the request since its last output; only when events are logged."""
    error_field: str = ""
    """With ``error``: the field of the request that is at fault, so that trying again does not help."""


class SchedulerStats(msgspec.Struct, array_like=True, gc=False):
    """The scheduler after a step; counters grow over the life of the core."""

    num_waiting: int = 0
    num_running: int = 0
    num_waiting_tokens: int = 0
    """Tokens of the waiting requests that are not computed yet."""
    kv_usage: float = 0.0
    """Share of blocks held by requests, in [0, 1]."""
    num_free_blocks: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up (counter)."""
    prefix_cache_hits: int = 0
    """Prompt tokens found in the pool (counter)."""
    num_preemptions: int = 0
    """Counter."""
    kv_blocks_received: int = 0
    """Counter: blocks loaded from other engines and found valid."""
    kv_bytes_received: dict[str, int] = {}
    """Counters by transport."""
    kv_recomputes: dict[str, int] = {}
    """Counters by reason (``KV_FAILURES``): requests whose remote KV was not used."""
    num_leases: int = 0
    """Leases held now."""
    prefix_cache_requests: int = 0
    """Requests that were looked up (counter)."""
    preempted_prefix_cache_queries: int = 0
    """Tokens of preempted requests that were looked up again (counter), not in ``prefix_cache_queries``."""
    preempted_prefix_cache_hits: int = 0
    """Of those, tokens found (counter)."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens, not found in the pool, that another engine or tier was asked for (counter)."""
    external_prefix_cache_hits: int = 0
    """Of those, tokens loaded (counter)."""


class UtilityCall(msgspec.Struct, array_like=True, gc=False):
    """A call of one of the core's utilities, by name."""

    call_id: int
    method: str
    args: list[msgspec.Raw]


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a UTILITY call."""

    call_id: int
    result: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""

    def value(self) -> object:
        """Return what the utility returned. Raises ``UtilityError`` when it failed."""
        if self.error:
            raise UtilityError(self.error)
        return from_raw(self.result)


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Everything that one step produced for one client."""

    step: int = 0
    """Steps executed so far; stands still when the loop hangs."""
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    utility_output: UtilityOutput | None = None
    kv_events: list[KVCacheEvent] = []
    """What the prefix cache gained and lost since the last step, if anybody is to know."""
    num_requests_added: int = 0
    """ADDs that the core had taken in: which of the client's requests the statistics cover."""


class CoreHello(msgspec.Struct, tag="HELLO"):
    """Core to client: the process is up."""

    pid: int


class CoreInit(msgspec.Struct, tag="INIT"):
    """Client to core: what to become, and which sockets to use."""

    input_address: str
    output_address: str
    config: EngineConfig
    kv_address: str = ""
    """Of the socket pair that ``kv_messages`` travel over; empty: this core moves no KV."""
    arrays: ArenaAddress | None = None
    """Where large arrays of requests lie; None: in frames."""


class CoreReady(msgspec.Struct, tag="READY"):
    """Core to client: the model is loaded, the KV pool is there."""

    num_kv_blocks: int
    max_model_len: int
    """After fitting to the KV pool."""
    vocab_size: int
    block_size: int
    kv_layout: str
    """As in ``Fingerprint.kv_layout``."""
    numerics: str
    """As in ``Fingerprint.numerics``."""
    hidden_size: int = 0
    """Columns of prompt embeddings."""


class CoreFailed(msgspec.Struct, tag="FAILED"):
    """Core to client: start-up failed, with what an operator needs to know.

    Attributes:
        permanent: The configuration or the checkpoint is at fault: another start would end the same way.
    """

    error: str
    permanent: bool = False

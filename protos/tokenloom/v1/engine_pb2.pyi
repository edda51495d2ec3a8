import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from tokenloom.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAUSE_MODE_UNSPECIFIED: _ClassVar[PauseMode]
    PAUSE_MODE_ABORT: _ClassVar[PauseMode]
    PAUSE_MODE_WAIT: _ClassVar[PauseMode]
    PAUSE_MODE_KEEP: _ClassVar[PauseMode]

class WakeTag(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAKE_TAG_UNSPECIFIED: _ClassVar[WakeTag]
    WAKE_TAG_WEIGHTS: _ClassVar[WakeTag]
    WAKE_TAG_KV_CACHE: _ClassVar[WakeTag]
    WAKE_TAG_SCHEDULING: _ClassVar[WakeTag]
PAUSE_MODE_UNSPECIFIED: PauseMode
PAUSE_MODE_ABORT: PauseMode
PAUSE_MODE_WAIT: PauseMode
PAUSE_MODE_KEEP: PauseMode
WAKE_TAG_UNSPECIFIED: WakeTag
WAKE_TAG_WEIGHTS: WakeTag
WAKE_TAG_KV_CACHE: WakeTag
WAKE_TAG_SCHEDULING: WakeTag

class EngineInput(_message.Message):
    __slots__ = ("hello", "add", "stop_at", "abort_slots", "credit", "accept", "keep_slots", "quarantine")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADD_FIELD_NUMBER: _ClassVar[int]
    STOP_AT_FIELD_NUMBER: _ClassVar[int]
    ABORT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_FIELD_NUMBER: _ClassVar[int]
    KEEP_SLOTS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    add: _containers.RepeatedCompositeFieldContainer[AddRequest]
    stop_at: _containers.RepeatedCompositeFieldContainer[StopAt]
    abort_slots: _containers.RepeatedScalarFieldContainer[int]
    credit: int
    accept: _containers.RepeatedCompositeFieldContainer[AcceptTokens]
    keep_slots: _containers.RepeatedScalarFieldContainer[int]
    quarantine: Quarantine
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., add: _Optional[_Iterable[_Union[AddRequest, _Mapping]]] = ..., stop_at: _Optional[_Iterable[_Union[StopAt, _Mapping]]] = ..., abort_slots: _Optional[_Iterable[int]] = ..., credit: _Optional[int] = ..., accept: _Optional[_Iterable[_Union[AcceptTokens, _Mapping]]] = ..., keep_slots: _Optional[_Iterable[int]] = ..., quarantine: _Optional[_Union[Quarantine, _Mapping]] = ...) -> None: ...

class Quarantine(_message.Message):
    __slots__ = ("engine_epoch", "reason")
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    engine_epoch: int
    reason: str
    def __init__(self, engine_epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AddRequest(_message.Message):
    __slots__ = ("slot", "request_id", "prompt", "accepted_token_ids", "sampling_params", "pooling_params", "priority", "timeout", "kv_source", "hold_kv", "pick", "trace_headers", "awaits_tokens", "tenant", "session")
    class TraceHeadersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    POOLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    HOLD_KV_FIELD_NUMBER: _ClassVar[int]
    PICK_FIELD_NUMBER: _ClassVar[int]
    TRACE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    prompt: _types_pb2.Prompt
    accepted_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling_params: _types_pb2.SamplingParams
    pooling_params: _types_pb2.PoolingParams
    priority: int
    timeout: _duration_pb2.Duration
    kv_source: KVSource
    hold_kv: bool
    pick: PickId
    trace_headers: _containers.ScalarMap[str, str]
    awaits_tokens: bool
    tenant: str
    session: SessionTurn
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., accepted_token_ids: _Optional[_Iterable[int]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., pooling_params: _Optional[_Union[_types_pb2.PoolingParams, _Mapping]] = ..., priority: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_source: _Optional[_Union[KVSource, _Mapping]] = ..., hold_kv: _Optional[bool] = ..., pick: _Optional[_Union[PickId, _Mapping]] = ..., trace_headers: _Optional[_Mapping[str, str]] = ..., awaits_tokens: _Optional[bool] = ..., tenant: _Optional[str] = ..., session: _Optional[_Union[SessionTurn, _Mapping]] = ...) -> None: ...

class SessionTurn(_message.Message):
    __slots__ = ("branch", "return_milliseconds", "past_tokens", "moved", "keep_seconds", "from_store")
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    RETURN_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    PAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    branch: int
    return_milliseconds: int
    past_tokens: int
    moved: bool
    keep_seconds: int
    from_store: bool
    def __init__(self, branch: _Optional[int] = ..., return_milliseconds: _Optional[int] = ..., past_tokens: _Optional[int] = ..., moved: _Optional[bool] = ..., keep_seconds: _Optional[int] = ..., from_store: _Optional[bool] = ...) -> None: ...

class AcceptTokens(_message.Message):
    __slots__ = ("slot", "token_ids")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, slot: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class PickId(_message.Message):
    __slots__ = ("coordinator_epoch", "number")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    number: int
    def __init__(self, coordinator_epoch: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class KVSource(_message.Message):
    __slots__ = ("engine_id", "engine_epoch", "lease_id", "num_tokens", "weights", "bound_tokens")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    engine_epoch: int
    lease_id: bytes
    num_tokens: int
    weights: bytes
    bound_tokens: int
    def __init__(self, engine_id: _Optional[str] = ..., engine_epoch: _Optional[int] = ..., lease_id: _Optional[bytes] = ..., num_tokens: _Optional[int] = ..., weights: _Optional[bytes] = ..., bound_tokens: _Optional[int] = ...) -> None: ...

class StopAt(_message.Message):
    __slots__ = ("slot", "num_tokens")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    num_tokens: int
    def __init__(self, slot: _Optional[int] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class EngineFrame(_message.Message):
    __slots__ = ("hello", "step", "slot", "token_index", "num_tokens", "token_ids", "finished", "logprobs", "kv_granted", "paused", "pooled")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KV_GRANTED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    step: int
    slot: _containers.RepeatedScalarFieldContainer[int]
    token_index: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    logprobs: _containers.RepeatedCompositeFieldContainer[SlotLogprobs]
    kv_granted: _containers.RepeatedCompositeFieldContainer[KVGrant]
    paused: bool
    pooled: _containers.RepeatedCompositeFieldContainer[_types_pb2.Pooled]
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., step: _Optional[int] = ..., slot: _Optional[_Iterable[int]] = ..., token_index: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[SlotLogprobs, _Mapping]]] = ..., kv_granted: _Optional[_Iterable[_Union[KVGrant, _Mapping]]] = ..., paused: _Optional[bool] = ..., pooled: _Optional[_Iterable[_Union[_types_pb2.Pooled, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("slot", "reason", "num_output_tokens", "stop_token_id", "cached_tokens", "kv", "error", "queued_ns", "kv_wait_ns", "prefill_ns", "drafts", "routed_experts", "preempted_at", "cpu_ns")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    KV_WAIT_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_AT_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: _types_pb2.FinishReason
    num_output_tokens: int
    stop_token_id: int
    cached_tokens: int
    kv: KVSource
    error: _types_pb2.Error
    queued_ns: int
    kv_wait_ns: int
    prefill_ns: int
    drafts: _types_pb2.DraftCounts
    routed_experts: _types_pb2.RoutedExperts
    preempted_at: _containers.RepeatedScalarFieldContainer[int]
    cpu_ns: int
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., num_output_tokens: _Optional[int] = ..., stop_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., kv: _Optional[_Union[KVSource, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., queued_ns: _Optional[int] = ..., kv_wait_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., drafts: _Optional[_Union[_types_pb2.DraftCounts, _Mapping]] = ..., routed_experts: _Optional[_Union[_types_pb2.RoutedExperts, _Mapping]] = ..., preempted_at: _Optional[_Iterable[int]] = ..., cpu_ns: _Optional[int] = ...) -> None: ...

class SlotLogprobs(_message.Message):
    __slots__ = ("slot", "prompt", "token_index", "logprobs")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    prompt: bool
    token_index: int
    logprobs: _types_pb2.Logprobs
    def __init__(self, slot: _Optional[int] = ..., prompt: _Optional[bool] = ..., token_index: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ...) -> None: ...

class KVGrant(_message.Message):
    __slots__ = ("slot", "kv", "moves", "target")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    slot: int
    kv: KVSource
    moves: bool
    target: str
    def __init__(self, slot: _Optional[int] = ..., kv: _Optional[_Union[KVSource, _Mapping]] = ..., moves: _Optional[bool] = ..., target: _Optional[str] = ...) -> None: ...

class MoveRequestsRequest(_message.Message):
    __slots__ = ("request_id", "target")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    target: str
    def __init__(self, request_id: _Optional[str] = ..., target: _Optional[str] = ...) -> None: ...

class MoveRequestsResponse(_message.Message):
    __slots__ = ("moved", "ended", "stayed", "reasons")
    MOVED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    STAYED_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    moved: int
    ended: int
    stayed: int
    reasons: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, moved: _Optional[int] = ..., ended: _Optional[int] = ..., stayed: _Optional[int] = ..., reasons: _Optional[_Iterable[str]] = ...) -> None: ...

class ReconfigureRequest(_message.Message):
    __slots__ = ("data_parallel_size",)
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    data_parallel_size: int
    def __init__(self, data_parallel_size: _Optional[int] = ...) -> None: ...

class ReconfigureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadLoraRequest(_message.Message):
    __slots__ = ("name", "path", "digest", "in_place")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: bytes
    in_place: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ..., in_place: _Optional[bool] = ...) -> None: ...

class LoadLoraResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ...) -> None: ...

class UnloadLoraRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLorasResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[LoraState]
    def __init__(self, adapters: _Optional[_Iterable[_Union[LoraState, _Mapping]]] = ...) -> None: ...

class LoraState(_message.Message):
    __slots__ = ("adapter", "rank", "in_slot", "requests")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    IN_SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    rank: int
    in_slot: bool
    requests: int
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ..., rank: _Optional[int] = ..., in_slot: _Optional[bool] = ..., requests: _Optional[int] = ...) -> None: ...

class PinLoraRequest(_message.Message):
    __slots__ = ("name", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class PinLoraResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineInfoResponse(_message.Message):
    __slots__ = ("fingerprint", "num_kv_blocks", "max_model_len", "waiting", "running", "pause_mode")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: _types_pb2.Fingerprint
    num_kv_blocks: int
    max_model_len: int
    waiting: int
    running: int
    pause_mode: PauseMode
    def __init__(self, fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., num_kv_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., pause_mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("mode", "clear_cache")
    MODE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    mode: PauseMode
    clear_cache: bool
    def __init__(self, mode: _Optional[_Union[PauseMode, str]] = ..., clear_cache: _Optional[bool] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ("preempt_running",)
    PREEMPT_RUNNING_FIELD_NUMBER: _ClassVar[int]
    preempt_running: bool
    def __init__(self, preempt_running: _Optional[bool] = ...) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetEncoderCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetEncoderCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchKVEventsRequest(_message.Message):
    __slots__ = ("from_sequence", "prefix_interval")
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PREFIX_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    prefix_interval: _duration_pb2.Duration
    def __init__(self, from_sequence: _Optional[int] = ..., prefix_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchKVEventsResponse(_message.Message):
    __slots__ = ("sequence", "engine_epoch", "time", "events", "prefix_changes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CHANGES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    engine_epoch: int
    time: _timestamp_pb2.Timestamp
    events: _containers.RepeatedCompositeFieldContainer[KVCacheEvent]
    prefix_changes: PrefixChanges
    def __init__(self, sequence: _Optional[int] = ..., engine_epoch: _Optional[int] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., events: _Optional[_Iterable[_Union[KVCacheEvent, _Mapping]]] = ..., prefix_changes: _Optional[_Union[PrefixChanges, _Mapping]] = ...) -> None: ...

class PrefixChanges(_message.Message):
    __slots__ = ("first_sequence", "specimen_hash", "all_cleared", "removed", "stored", "states_removed", "states_stored")
    FIRST_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SPECIMEN_HASH_FIELD_NUMBER: _ClassVar[int]
    ALL_CLEARED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    STATES_REMOVED_FIELD_NUMBER: _ClassVar[int]
    STATES_STORED_FIELD_NUMBER: _ClassVar[int]
    first_sequence: int
    specimen_hash: bytes
    all_cleared: bool
    removed: _containers.RepeatedScalarFieldContainer[int]
    stored: _containers.RepeatedCompositeFieldContainer[PrefixChain]
    states_removed: _containers.RepeatedScalarFieldContainer[int]
    states_stored: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_sequence: _Optional[int] = ..., specimen_hash: _Optional[bytes] = ..., all_cleared: _Optional[bool] = ..., removed: _Optional[_Iterable[int]] = ..., stored: _Optional[_Iterable[_Union[PrefixChain, _Mapping]]] = ..., states_removed: _Optional[_Iterable[int]] = ..., states_stored: _Optional[_Iterable[int]] = ...) -> None: ...

class PrefixChain(_message.Message):
    __slots__ = ("parent", "blocks")
    PARENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    parent: int
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, parent: _Optional[int] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class KVCacheEvent(_message.Message):
    __slots__ = ("block_stored", "block_removed", "all_blocks_cleared", "state_stored", "state_removed")
    BLOCK_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_REMOVED_FIELD_NUMBER: _ClassVar[int]
    ALL_BLOCKS_CLEARED_FIELD_NUMBER: _ClassVar[int]
    STATE_STORED_FIELD_NUMBER: _ClassVar[int]
    STATE_REMOVED_FIELD_NUMBER: _ClassVar[int]
    block_stored: BlockStored
    block_removed: BlockRemoved
    all_blocks_cleared: AllBlocksCleared
    state_stored: StateStored
    state_removed: StateRemoved
    def __init__(self, block_stored: _Optional[_Union[BlockStored, _Mapping]] = ..., block_removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., all_blocks_cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ..., state_stored: _Optional[_Union[StateStored, _Mapping]] = ..., state_removed: _Optional[_Union[StateRemoved, _Mapping]] = ...) -> None: ...

class StateStored(_message.Message):
    __slots__ = ("named_block",)
    NAMED_BLOCK_FIELD_NUMBER: _ClassVar[int]
    named_block: bytes
    def __init__(self, named_block: _Optional[bytes] = ...) -> None: ...

class StateRemoved(_message.Message):
    __slots__ = ("named_block",)
    NAMED_BLOCK_FIELD_NUMBER: _ClassVar[int]
    named_block: bytes
    def __init__(self, named_block: _Optional[bytes] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "num_blocks_before", "named_block_before")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PARENT_BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_BEFORE_FIELD_NUMBER: _ClassVar[int]
    NAMED_BLOCK_BEFORE_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    parent_block_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    medium: str
    num_blocks_before: int
    named_block_before: bytes
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., parent_block_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., medium: _Optional[str] = ..., num_blocks_before: _Optional[int] = ..., named_block_before: _Optional[bytes] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("block_hashes", "medium")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    medium: str
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., medium: _Optional[str] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: _types_pb2.EngineRole
    def __init__(self, role: _Optional[_Union[_types_pb2.EngineRole, str]] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SleepRequest(_message.Message):
    __slots__ = ("level", "mode")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    level: int
    mode: PauseMode
    def __init__(self, level: _Optional[int] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class SleepResponse(_message.Message):
    __slots__ = ("weights_bytes", "kv_cache_bytes", "kept_on_host_bytes")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_ON_HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    kv_cache_bytes: int
    kept_on_host_bytes: int
    def __init__(self, weights_bytes: _Optional[int] = ..., kv_cache_bytes: _Optional[int] = ..., kept_on_host_bytes: _Optional[int] = ...) -> None: ...

class WakeUpRequest(_message.Message):
    __slots__ = ("tags",)
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tags: _containers.RepeatedScalarFieldContainer[WakeTag]
    def __init__(self, tags: _Optional[_Iterable[_Union[WakeTag, str]]] = ...) -> None: ...

class WakeUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IsSleepingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class IsSleepingResponse(_message.Message):
    __slots__ = ("sleeping",)
    SLEEPING_FIELD_NUMBER: _ClassVar[int]
    sleeping: bool
    def __init__(self, sleeping: _Optional[bool] = ...) -> None: ...

class ReloadWeightsRequest(_message.Message):
    __slots__ = ("path", "mode")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    path: str
    mode: PauseMode
    def __init__(self, path: _Optional[str] = ..., mode: _Optional[_Union[PauseMode, str]] = ...) -> None: ...

class ReloadWeightsResponse(_message.Message):
    __slots__ = ("fingerprint",)
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: _types_pb2.Fingerprint
    def __init__(self, fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ...) -> None: ...

class CheckWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageWeightsRequest(_message.Message):
    __slots__ = ("data", "shared_memory")
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    shared_memory: str
    def __init__(self, data: _Optional[bytes] = ..., shared_memory: _Optional[str] = ...) -> None: ...

class StageWeightsResponse(_message.Message):
    __slots__ = ("path", "weights")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    path: str
    weights: bytes
    def __init__(self, path: _Optional[str] = ..., weights: _Optional[bytes] = ...) -> None: ...

class StartProfileRequest(_message.Message):
    __slots__ = ("profile_prefix",)
    PROFILE_PREFIX_FIELD_NUMBER: _ClassVar[int]
    profile_prefix: str
    def __init__(self, profile_prefix: _Optional[str] = ...) -> None: ...

class StartProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StopProfileResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tokenloom.v1 import engine_pb2 as _engine_pb2
from tokenloom.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_STATE_UNSPECIFIED: _ClassVar[EngineState]
    ENGINE_STATE_STARTING: _ClassVar[EngineState]
    ENGINE_STATE_SERVING: _ClassVar[EngineState]
    ENGINE_STATE_DRAINING: _ClassVar[EngineState]
    ENGINE_STATE_DEAD: _ClassVar[EngineState]
    ENGINE_STATE_PAUSED: _ClassVar[EngineState]

class PlacementRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_RULE_UNSPECIFIED: _ClassVar[PlacementRule]
    PLACEMENT_RULE_SCORE: _ClassVar[PlacementRule]
    PLACEMENT_RULE_COST: _ClassVar[PlacementRule]
    PLACEMENT_RULE_PLUGIN: _ClassVar[PlacementRule]
ENGINE_STATE_UNSPECIFIED: EngineState
ENGINE_STATE_STARTING: EngineState
ENGINE_STATE_SERVING: EngineState
ENGINE_STATE_DRAINING: EngineState
ENGINE_STATE_DEAD: EngineState
ENGINE_STATE_PAUSED: EngineState
PLACEMENT_RULE_UNSPECIFIED: PlacementRule
PLACEMENT_RULE_SCORE: PlacementRule
PLACEMENT_RULE_COST: PlacementRule
PLACEMENT_RULE_PLUGIN: PlacementRule

class EngineIdentity(_message.Message):
    __slots__ = ("engine_id", "epoch", "address", "kv_address", "host", "fingerprint", "limits", "num_kv_blocks", "publishes_kv_events", "data_parallel_rank", "parallel_config_hash", "computes_in_waves", "data_parallel_group", "weight_bytes", "num_state_slots", "state_boundary", "plugins", "kv_store", "num_threads", "draws_by_drafts")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KV_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHES_KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_IN_WAVES_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_GROUP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_BOUNDARY_FIELD_NUMBER: _ClassVar[int]
    PLUGINS_FIELD_NUMBER: _ClassVar[int]
    KV_STORE_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    DRAWS_BY_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch: int
    address: str
    kv_address: str
    host: str
    fingerprint: _types_pb2.Fingerprint
    limits: _types_pb2.ModelLimits
    num_kv_blocks: int
    publishes_kv_events: bool
    data_parallel_rank: int
    parallel_config_hash: bytes
    computes_in_waves: bool
    data_parallel_group: str
    weight_bytes: int
    num_state_slots: int
    state_boundary: int
    plugins: _containers.RepeatedScalarFieldContainer[str]
    kv_store: bytes
    num_threads: int
    draws_by_drafts: bool
    def __init__(self, engine_id: _Optional[str] = ..., epoch: _Optional[int] = ..., address: _Optional[str] = ..., kv_address: _Optional[str] = ..., host: _Optional[str] = ..., fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., limits: _Optional[_Union[_types_pb2.ModelLimits, _Mapping]] = ..., num_kv_blocks: _Optional[int] = ..., publishes_kv_events: _Optional[bool] = ..., data_parallel_rank: _Optional[int] = ..., parallel_config_hash: _Optional[bytes] = ..., computes_in_waves: _Optional[bool] = ..., data_parallel_group: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., num_state_slots: _Optional[int] = ..., state_boundary: _Optional[int] = ..., plugins: _Optional[_Iterable[str]] = ..., kv_store: _Optional[bytes] = ..., num_threads: _Optional[int] = ..., draws_by_drafts: _Optional[bool] = ...) -> None: ...

class EngineReport(_message.Message):
    __slots__ = ("hello", "identity", "role", "state", "waiting", "running", "waiting_tokens", "kv_usage", "free_kv_blocks", "picks_arrived", "step", "seats", "prefill_tokens_per_second", "starts_per_second", "adapters", "computed_tokens_per_second", "prompt_tokens_per_second", "step_seconds", "step_requests", "prefilling_tokens", "start_wave", "wave_complete", "group_size", "fall_backs", "join", "progress", "short_of_blocks")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PICKS_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STARTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PREFILLING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_WAVE_FIELD_NUMBER: _ClassVar[int]
    WAVE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    FALL_BACKS_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    SHORT_OF_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    identity: EngineIdentity
    role: _types_pb2.EngineRole
    state: EngineState
    waiting: int
    running: int
    waiting_tokens: int
    kv_usage: float
    free_kv_blocks: int
    picks_arrived: _containers.RepeatedCompositeFieldContainer[_engine_pb2.PickId]
    step: int
    seats: int
    prefill_tokens_per_second: float
    starts_per_second: float
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Adapter]
    computed_tokens_per_second: float
    prompt_tokens_per_second: float
    step_seconds: float
    step_requests: float
    prefilling_tokens: int
    start_wave: int
    wave_complete: int
    group_size: int
    fall_backs: _containers.RepeatedCompositeFieldContainer[_types_pb2.FallBack]
    join: JoinFacts
    progress: StateProgress
    short_of_blocks: bool
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., identity: _Optional[_Union[EngineIdentity, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.EngineRole, str]] = ..., state: _Optional[_Union[EngineState, str]] = ..., waiting: _Optional[int] = ..., running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., kv_usage: _Optional[float] = ..., free_kv_blocks: _Optional[int] = ..., picks_arrived: _Optional[_Iterable[_Union[_engine_pb2.PickId, _Mapping]]] = ..., step: _Optional[int] = ..., seats: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., starts_per_second: _Optional[float] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.Adapter, _Mapping]]] = ..., computed_tokens_per_second: _Optional[float] = ..., prompt_tokens_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ..., step_requests: _Optional[float] = ..., prefilling_tokens: _Optional[int] = ..., start_wave: _Optional[int] = ..., wave_complete: _Optional[int] = ..., group_size: _Optional[int] = ..., fall_backs: _Optional[_Iterable[_Union[_types_pb2.FallBack, _Mapping]]] = ..., join: _Optional[_Union[JoinFacts, _Mapping]] = ..., progress: _Optional[_Union[StateProgress, _Mapping]] = ..., short_of_blocks: _Optional[bool] = ...) -> None: ...

class JoinFacts(_message.Message):
    __slots__ = ("incarnation", "supervisor", "start_role", "start_weights", "weights_path", "desired")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    START_ROLE_FIELD_NUMBER: _ClassVar[int]
    START_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    supervisor: str
    start_role: _types_pb2.EngineRole
    start_weights: bytes
    weights_path: str
    desired: DesiredState
    def __init__(self, incarnation: _Optional[int] = ..., supervisor: _Optional[str] = ..., start_role: _Optional[_Union[_types_pb2.EngineRole, str]] = ..., start_weights: _Optional[bytes] = ..., weights_path: _Optional[str] = ..., desired: _Optional[_Union[DesiredState, _Mapping]] = ...) -> None: ...

class StateProgress(_message.Message):
    __slots__ = ("reached", "failed", "cause")
    REACHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    reached: int
    failed: int
    cause: str
    def __init__(self, reached: _Optional[int] = ..., failed: _Optional[int] = ..., cause: _Optional[str] = ...) -> None: ...

class DesiredState(_message.Message):
    __slots__ = ("revision", "pause_mode", "clear_cache", "sleep_level", "awake", "engines", "weights_path", "weights_version", "replaced_weights", "weights_mode")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    PAUSE_MODE_FIELD_NUMBER: _ClassVar[int]
    CLEAR_CACHE_FIELD_NUMBER: _ClassVar[int]
    SLEEP_LEVEL_FIELD_NUMBER: _ClassVar[int]
    AWAKE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLACED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_MODE_FIELD_NUMBER: _ClassVar[int]
    revision: int
    pause_mode: _engine_pb2.PauseMode
    clear_cache: bool
    sleep_level: int
    awake: _containers.RepeatedScalarFieldContainer[_engine_pb2.WakeTag]
    engines: _containers.RepeatedCompositeFieldContainer[EngineSetting]
    weights_path: str
    weights_version: int
    replaced_weights: _containers.RepeatedScalarFieldContainer[bytes]
    weights_mode: _engine_pb2.PauseMode
    def __init__(self, revision: _Optional[int] = ..., pause_mode: _Optional[_Union[_engine_pb2.PauseMode, str]] = ..., clear_cache: _Optional[bool] = ..., sleep_level: _Optional[int] = ..., awake: _Optional[_Iterable[_Union[_engine_pb2.WakeTag, str]]] = ..., engines: _Optional[_Iterable[_Union[EngineSetting, _Mapping]]] = ..., weights_path: _Optional[str] = ..., weights_version: _Optional[int] = ..., replaced_weights: _Optional[_Iterable[bytes]] = ..., weights_mode: _Optional[_Union[_engine_pb2.PauseMode, str]] = ...) -> None: ...

class EngineSetting(_message.Message):
    __slots__ = ("engine_id", "role", "start_role", "weights_path", "start_weights")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    START_ROLE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_PATH_FIELD_NUMBER: _ClassVar[int]
    START_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    role: _types_pb2.EngineRole
    start_role: _types_pb2.EngineRole
    weights_path: str
    start_weights: bytes
    def __init__(self, engine_id: _Optional[str] = ..., role: _Optional[_Union[_types_pb2.EngineRole, str]] = ..., start_role: _Optional[_Union[_types_pb2.EngineRole, str]] = ..., weights_path: _Optional[str] = ..., start_weights: _Optional[bytes] = ...) -> None: ...

class EngineCommand(_message.Message):
    __slots__ = ("hello", "drain", "adapters", "start_wave", "data_parallel_size", "relief", "report_interval", "waits_aside", "desired", "incarnation")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    START_WAVE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    RELIEF_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    WAITS_ASIDE_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    drain: Drain
    adapters: AdapterChanges
    start_wave: int
    data_parallel_size: int
    relief: Relief
    report_interval: _duration_pb2.Duration
    waits_aside: str
    desired: DesiredState
    incarnation: int
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., adapters: _Optional[_Union[AdapterChanges, _Mapping]] = ..., start_wave: _Optional[int] = ..., data_parallel_size: _Optional[int] = ..., relief: _Optional[_Union[Relief, _Mapping]] = ..., report_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., waits_aside: _Optional[str] = ..., desired: _Optional[_Union[DesiredState, _Mapping]] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Relief(_message.Message):
    __slots__ = ("target", "count", "before_preemption", "free_tokens")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_PREEMPTION_FIELD_NUMBER: _ClassVar[int]
    FREE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    target: str
    count: int
    before_preemption: bool
    free_tokens: int
    def __init__(self, target: _Optional[str] = ..., count: _Optional[int] = ..., before_preemption: _Optional[bool] = ..., free_tokens: _Optional[int] = ...) -> None: ...

class AdapterChanges(_message.Message):
    __slots__ = ("load", "unload")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_FIELD_NUMBER: _ClassVar[int]
    load: _containers.RepeatedCompositeFieldContainer[_types_pb2.Adapter]
    unload: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, load: _Optional[_Iterable[_Union[_types_pb2.Adapter, _Mapping]]] = ..., unload: _Optional[_Iterable[str]] = ...) -> None: ...

class PickRequest(_message.Message):
    __slots__ = ("fingerprint", "role", "prompt_tokens", "max_new_tokens", "block_hash_prefixes", "tenant", "priority", "timeout", "exclude", "adapter", "query_id", "pools", "subset", "data_parallel_rank", "session", "keep_seconds", "preferred_engine")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    EXCLUDE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    SUBSET_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_ENGINE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: _types_pb2.Fingerprint
    role: _types_pb2.EngineRole
    prompt_tokens: int
    max_new_tokens: int
    block_hash_prefixes: _containers.RepeatedScalarFieldContainer[int]
    tenant: str
    priority: int
    timeout: _duration_pb2.Duration
    exclude: _containers.RepeatedCompositeFieldContainer[EngineRef]
    adapter: bytes
    query_id: str
    pools: bool
    subset: Subset
    data_parallel_rank: int
    session: int
    keep_seconds: int
    preferred_engine: str
    def __init__(self, fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., role: _Optional[_Union[_types_pb2.EngineRole, str]] = ..., prompt_tokens: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., block_hash_prefixes: _Optional[_Iterable[int]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., exclude: _Optional[_Iterable[_Union[EngineRef, _Mapping]]] = ..., adapter: _Optional[bytes] = ..., query_id: _Optional[str] = ..., pools: _Optional[bool] = ..., subset: _Optional[_Union[Subset, _Mapping]] = ..., data_parallel_rank: _Optional[int] = ..., session: _Optional[int] = ..., keep_seconds: _Optional[int] = ..., preferred_engine: _Optional[str] = ...) -> None: ...

class EnrollRequest(_message.Message):
    __slots__ = ("service", "instance_id")
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    service: str
    instance_id: str
    def __init__(self, service: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class Position(_message.Message):
    __slots__ = ("index", "count")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class Subset(_message.Message):
    __slots__ = ("index", "count", "size")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    index: int
    count: int
    size: int
    def __init__(self, index: _Optional[int] = ..., count: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class EngineRef(_message.Message):
    __slots__ = ("engine_id", "epoch")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    epoch: int
    def __init__(self, engine_id: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class PickResponse(_message.Message):
    __slots__ = ("engine", "whole_request", "pick", "session")
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PICK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    engine: EngineIdentity
    whole_request: bool
    pick: _engine_pb2.PickId
    session: _engine_pb2.SessionTurn
    def __init__(self, engine: _Optional[_Union[EngineIdentity, _Mapping]] = ..., whole_request: _Optional[bool] = ..., pick: _Optional[_Union[_engine_pb2.PickId, _Mapping]] = ..., session: _Optional[_Union[_engine_pb2.SessionTurn, _Mapping]] = ...) -> None: ...

class PickBatch(_message.Message):
    __slots__ = ("pick",)
    PICK_FIELD_NUMBER: _ClassVar[int]
    pick: _containers.RepeatedCompositeFieldContainer[PickRequest]
    def __init__(self, pick: _Optional[_Iterable[_Union[PickRequest, _Mapping]]] = ...) -> None: ...

class PickResults(_message.Message):
    __slots__ = ("result",)
    RESULT_FIELD_NUMBER: _ClassVar[int]
    result: _containers.RepeatedCompositeFieldContainer[PickResult]
    def __init__(self, result: _Optional[_Iterable[_Union[PickResult, _Mapping]]] = ...) -> None: ...

class PickResult(_message.Message):
    __slots__ = ("response", "error")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    response: PickResponse
    error: _types_pb2.Error
    def __init__(self, response: _Optional[_Union[PickResponse, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("changes", "without_loads")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_LOADS_FIELD_NUMBER: _ClassVar[int]
    changes: bool
    without_loads: bool
    def __init__(self, changes: _Optional[bool] = ..., without_loads: _Optional[bool] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("coordinator_epoch", "revision", "complete", "engines", "pd_threshold", "adapters", "base_revision", "left", "loads", "new_adapters", "unloaded_adapters", "prefixes", "placement", "desired", "encoders", "new_encoders", "mixes_numerics")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PD_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    BASE_REVISION_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    NEW_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    ENCODERS_FIELD_NUMBER: _ClassVar[int]
    NEW_ENCODERS_FIELD_NUMBER: _ClassVar[int]
    MIXES_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    revision: int
    complete: bool
    engines: _containers.RepeatedCompositeFieldContainer[EngineEntry]
    pd_threshold: int
    adapters: _containers.RepeatedCompositeFieldContainer[_types_pb2.Adapter]
    base_revision: int
    left: _containers.RepeatedScalarFieldContainer[str]
    loads: EngineLoads
    new_adapters: bool
    unloaded_adapters: _containers.RepeatedScalarFieldContainer[str]
    prefixes: PrefixPlacements
    placement: PlacementRule
    desired: DesiredState
    encoders: _containers.RepeatedCompositeFieldContainer[EngineEntry]
    new_encoders: bool
    mixes_numerics: bool
    def __init__(self, coordinator_epoch: _Optional[int] = ..., revision: _Optional[int] = ..., complete: _Optional[bool] = ..., engines: _Optional[_Iterable[_Union[EngineEntry, _Mapping]]] = ..., pd_threshold: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[_types_pb2.Adapter, _Mapping]]] = ..., base_revision: _Optional[int] = ..., left: _Optional[_Iterable[str]] = ..., loads: _Optional[_Union[EngineLoads, _Mapping]] = ..., new_adapters: _Optional[bool] = ..., unloaded_adapters: _Optional[_Iterable[str]] = ..., prefixes: _Optional[_Union[PrefixPlacements, _Mapping]] = ..., placement: _Optional[_Union[PlacementRule, str]] = ..., desired: _Optional[_Union[DesiredState, _Mapping]] = ..., encoders: _Optional[_Iterable[_Union[EngineEntry, _Mapping]]] = ..., new_encoders: _Optional[bool] = ..., mixes_numerics: _Optional[bool] = ...) -> None: ...

class PrefixPlacements(_message.Message):
    __slots__ = ("block_hash", "engine", "other_engine")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    OTHER_ENGINE_FIELD_NUMBER: _ClassVar[int]
    block_hash: _containers.RepeatedScalarFieldContainer[int]
    engine: _containers.RepeatedScalarFieldContainer[int]
    other_engine: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block_hash: _Optional[_Iterable[int]] = ..., engine: _Optional[_Iterable[int]] = ..., other_engine: _Optional[_Iterable[int]] = ...) -> None: ...

class EngineLoads(_message.Message):
    __slots__ = ("number", "age_milliseconds", "score", "waiting", "waiting_tokens", "reported_waiting", "running", "reported_waiting_tokens", "kv_usage", "free_kv_blocks", "seats", "prefill_tokens_per_second", "starts_per_second", "prompt_tokens_per_second", "step_seconds", "step_requests", "uncached_tokens", "uncached_tokens_per_second", "expected_seconds")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    AGE_MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPORTED_WAITING_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    REPORTED_WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STARTS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STEP_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    number: _containers.RepeatedScalarFieldContainer[int]
    age_milliseconds: _containers.RepeatedScalarFieldContainer[int]
    score: _containers.RepeatedScalarFieldContainer[int]
    waiting: _containers.RepeatedScalarFieldContainer[int]
    waiting_tokens: _containers.RepeatedScalarFieldContainer[int]
    reported_waiting: _containers.RepeatedScalarFieldContainer[int]
    running: _containers.RepeatedScalarFieldContainer[int]
    reported_waiting_tokens: _containers.RepeatedScalarFieldContainer[int]
    kv_usage: _containers.RepeatedScalarFieldContainer[float]
    free_kv_blocks: _containers.RepeatedScalarFieldContainer[int]
    seats: _containers.RepeatedScalarFieldContainer[int]
    prefill_tokens_per_second: _containers.RepeatedScalarFieldContainer[float]
    starts_per_second: _containers.RepeatedScalarFieldContainer[float]
    prompt_tokens_per_second: _containers.RepeatedScalarFieldContainer[float]
    step_seconds: _containers.RepeatedScalarFieldContainer[float]
    step_requests: _containers.RepeatedScalarFieldContainer[float]
    uncached_tokens: _containers.RepeatedScalarFieldContainer[int]
    uncached_tokens_per_second: _containers.RepeatedScalarFieldContainer[float]
    expected_seconds: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, number: _Optional[_Iterable[int]] = ..., age_milliseconds: _Optional[_Iterable[int]] = ..., score: _Optional[_Iterable[int]] = ..., waiting: _Optional[_Iterable[int]] = ..., waiting_tokens: _Optional[_Iterable[int]] = ..., reported_waiting: _Optional[_Iterable[int]] = ..., running: _Optional[_Iterable[int]] = ..., reported_waiting_tokens: _Optional[_Iterable[int]] = ..., kv_usage: _Optional[_Iterable[float]] = ..., free_kv_blocks: _Optional[_Iterable[int]] = ..., seats: _Optional[_Iterable[int]] = ..., prefill_tokens_per_second: _Optional[_Iterable[float]] = ..., starts_per_second: _Optional[_Iterable[float]] = ..., prompt_tokens_per_second: _Optional[_Iterable[float]] = ..., step_seconds: _Optional[_Iterable[float]] = ..., step_requests: _Optional[_Iterable[float]] = ..., uncached_tokens: _Optional[_Iterable[int]] = ..., uncached_tokens_per_second: _Optional[_Iterable[float]] = ..., expected_seconds: _Optional[_Iterable[float]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("data_parallel_group", "data_parallel_size")
    DATA_PARALLEL_GROUP_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    data_parallel_group: str
    data_parallel_size: int
    def __init__(self, data_parallel_group: _Optional[str] = ..., data_parallel_size: _Optional[int] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetAdapterRequest(_message.Message):
    __slots__ = ("adapter", "unloaded")
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    adapter: _types_pb2.Adapter
    unloaded: bool
    def __init__(self, adapter: _Optional[_Union[_types_pb2.Adapter, _Mapping]] = ..., unloaded: _Optional[bool] = ...) -> None: ...

class SetAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDesiredStateRequest(_message.Message):
    __slots__ = ("pause", "resume", "sleep", "wake_up", "weights", "patience")
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    WAKE_UP_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    pause: _engine_pb2.PauseRequest
    resume: _engine_pb2.ResumeRequest
    sleep: _engine_pb2.SleepRequest
    wake_up: _engine_pb2.WakeUpRequest
    weights: _engine_pb2.ReloadWeightsRequest
    patience: _duration_pb2.Duration
    def __init__(self, pause: _Optional[_Union[_engine_pb2.PauseRequest, _Mapping]] = ..., resume: _Optional[_Union[_engine_pb2.ResumeRequest, _Mapping]] = ..., sleep: _Optional[_Union[_engine_pb2.SleepRequest, _Mapping]] = ..., wake_up: _Optional[_Union[_engine_pb2.WakeUpRequest, _Mapping]] = ..., weights: _Optional[_Union[_engine_pb2.ReloadWeightsRequest, _Mapping]] = ..., patience: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SetDesiredStateResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineProgress]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineProgress, _Mapping]]] = ...) -> None: ...

class EngineProgress(_message.Message):
    __slots__ = ("engine_id", "is_done", "cause", "follows")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    IS_DONE_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    FOLLOWS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    is_done: bool
    cause: str
    follows: bool
    def __init__(self, engine_id: _Optional[str] = ..., is_done: _Optional[bool] = ..., cause: _Optional[str] = ..., follows: _Optional[bool] = ...) -> None: ...

class EngineEntry(_message.Message):
    __slots__ = ("identity", "report", "age", "score", "waiting", "waiting_tokens", "number", "uncached_tokens", "uncached_tokens_per_second", "expected_seconds")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    identity: EngineIdentity
    report: EngineReport
    age: _duration_pb2.Duration
    score: int
    waiting: int
    waiting_tokens: int
    number: int
    uncached_tokens: int
    uncached_tokens_per_second: float
    expected_seconds: float
    def __init__(self, identity: _Optional[_Union[EngineIdentity, _Mapping]] = ..., report: _Optional[_Union[EngineReport, _Mapping]] = ..., age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., score: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., number: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., uncached_tokens_per_second: _Optional[float] = ..., expected_seconds: _Optional[float] = ...) -> None: ...

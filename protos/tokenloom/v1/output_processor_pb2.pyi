import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tokenloom.v1 import engine_pb2 as _engine_pb2
from tokenloom.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecallRequest(_message.Message):
    __slots__ = ("request_id", "tenant", "wants_prompt", "from_copy")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WANTS_PROMPT_FIELD_NUMBER: _ClassVar[int]
    FROM_COPY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    wants_prompt: bool
    from_copy: bool
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., wants_prompt: _Optional[bool] = ..., from_copy: _Optional[bool] = ...) -> None: ...

class RecallResponse(_message.Message):
    __slots__ = ("recipe", "fingerprint", "prompt", "is_attended", "num_counted")
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    IS_ATTENDED_FIELD_NUMBER: _ClassVar[int]
    NUM_COUNTED_FIELD_NUMBER: _ClassVar[int]
    recipe: bytes
    fingerprint: bytes
    prompt: _types_pb2.Prompt
    is_attended: bool
    num_counted: int
    def __init__(self, recipe: _Optional[bytes] = ..., fingerprint: _Optional[bytes] = ..., prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., is_attended: _Optional[bool] = ..., num_counted: _Optional[int] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("context_ids", "token_ids", "text", "held_text", "ends", "min_tokens", "single_ids")
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    HELD_TEXT_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SINGLE_IDS_FIELD_NUMBER: _ClassVar[int]
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: TextOptions
    held_text: str
    ends: bool
    min_tokens: int
    single_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, context_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[_Union[TextOptions, _Mapping]] = ..., held_text: _Optional[str] = ..., ends: _Optional[bool] = ..., min_tokens: _Optional[int] = ..., single_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text", "context_ids", "held_text", "stop_string", "single_bytes")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    HELD_TEXT_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    SINGLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    text: str
    context_ids: _containers.RepeatedScalarFieldContainer[int]
    held_text: str
    stop_string: str
    single_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, text: _Optional[str] = ..., context_ids: _Optional[_Iterable[int]] = ..., held_text: _Optional[str] = ..., stop_string: _Optional[str] = ..., single_bytes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ProcessInput(_message.Message):
    __slots__ = ("hello", "submit", "resume", "cancel_slots", "credit", "withdraw", "journal_copies", "moved")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CANCEL_SLOTS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    WITHDRAW_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_COPIES_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    submit: _containers.RepeatedCompositeFieldContainer[Submit]
    resume: _containers.RepeatedCompositeFieldContainer[Resume]
    cancel_slots: _containers.RepeatedScalarFieldContainer[int]
    credit: int
    withdraw: _containers.RepeatedCompositeFieldContainer[Withdrawal]
    journal_copies: JournalCopies
    moved: _containers.RepeatedCompositeFieldContainer[Withdrawal]
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., submit: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., resume: _Optional[_Iterable[_Union[Resume, _Mapping]]] = ..., cancel_slots: _Optional[_Iterable[int]] = ..., credit: _Optional[int] = ..., withdraw: _Optional[_Iterable[_Union[Withdrawal, _Mapping]]] = ..., journal_copies: _Optional[_Union[JournalCopies, _Mapping]] = ..., moved: _Optional[_Iterable[_Union[Withdrawal, _Mapping]]] = ...) -> None: ...

class JournalCopies(_message.Message):
    __slots__ = ("withdrawn", "begun", "outputs", "ended", "left")
    WITHDRAWN_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    withdrawn: _containers.RepeatedCompositeFieldContainer[Withdrawal]
    begun: _containers.RepeatedCompositeFieldContainer[Submit]
    outputs: _containers.RepeatedCompositeFieldContainer[CopiedOutput]
    ended: _containers.RepeatedScalarFieldContainer[int]
    left: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, withdrawn: _Optional[_Iterable[_Union[Withdrawal, _Mapping]]] = ..., begun: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., outputs: _Optional[_Iterable[_Union[CopiedOutput, _Mapping]]] = ..., ended: _Optional[_Iterable[int]] = ..., left: _Optional[_Iterable[int]] = ...) -> None: ...

class CopiedOutput(_message.Message):
    __slots__ = ("copy", "journals")
    COPY_FIELD_NUMBER: _ClassVar[int]
    JOURNALS_FIELD_NUMBER: _ClassVar[int]
    copy: int
    journals: _containers.RepeatedCompositeFieldContainer[SampleJournal]
    def __init__(self, copy: _Optional[int] = ..., journals: _Optional[_Iterable[_Union[SampleJournal, _Mapping]]] = ...) -> None: ...

class Withdrawal(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("slot", "request_id", "prompt", "block_hash_prefixes", "engine_deaths", "sampling_params", "pooling_params", "text", "tenant", "priority", "num_samples", "timeout", "trace_headers", "journals", "num_prompt_logprobs", "take_over", "fingerprint", "data_parallel_rank", "session", "keep_seconds", "preferred_engine", "recipe", "kv_transfer")
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
    BLOCK_HASH_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEATHS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    POOLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    TRACE_HEADERS_FIELD_NUMBER: _ClassVar[int]
    JOURNALS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TAKE_OVER_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_ENGINE_FIELD_NUMBER: _ClassVar[int]
    RECIPE_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    prompt: _types_pb2.Prompt
    block_hash_prefixes: _containers.RepeatedScalarFieldContainer[int]
    engine_deaths: int
    sampling_params: _types_pb2.SamplingParams
    pooling_params: _types_pb2.PoolingParams
    text: TextOptions
    tenant: str
    priority: int
    num_samples: int
    timeout: _duration_pb2.Duration
    trace_headers: _containers.ScalarMap[str, str]
    journals: _containers.RepeatedCompositeFieldContainer[SampleJournal]
    num_prompt_logprobs: int
    take_over: bool
    fingerprint: bytes
    data_parallel_rank: int
    session: int
    keep_seconds: int
    preferred_engine: str
    recipe: bytes
    kv_transfer: KVHandover
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[_Union[_types_pb2.Prompt, _Mapping]] = ..., block_hash_prefixes: _Optional[_Iterable[int]] = ..., engine_deaths: _Optional[int] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., pooling_params: _Optional[_Union[_types_pb2.PoolingParams, _Mapping]] = ..., text: _Optional[_Union[TextOptions, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., num_samples: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., trace_headers: _Optional[_Mapping[str, str]] = ..., journals: _Optional[_Iterable[_Union[SampleJournal, _Mapping]]] = ..., num_prompt_logprobs: _Optional[int] = ..., take_over: _Optional[bool] = ..., fingerprint: _Optional[bytes] = ..., data_parallel_rank: _Optional[int] = ..., session: _Optional[int] = ..., keep_seconds: _Optional[int] = ..., preferred_engine: _Optional[str] = ..., recipe: _Optional[bytes] = ..., kv_transfer: _Optional[_Union[KVHandover, _Mapping]] = ...) -> None: ...

class KVHandover(_message.Message):
    __slots__ = ("hold", "source", "first_token_id")
    HOLD_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    hold: bool
    source: _engine_pb2.KVSource
    first_token_id: int
    def __init__(self, hold: _Optional[bool] = ..., source: _Optional[_Union[_engine_pb2.KVSource, _Mapping]] = ..., first_token_id: _Optional[int] = ...) -> None: ...

class SampleJournal(_message.Message):
    __slots__ = ("sample_index", "token_ids", "emitted_text_bytes", "finished", "weights", "numerics", "mixed_numerics", "end")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MIXED_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    emitted_text_bytes: int
    finished: bool
    weights: _containers.RepeatedScalarFieldContainer[bytes]
    numerics: str
    mixed_numerics: bool
    end: RequestFinished
    def __init__(self, sample_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., emitted_text_bytes: _Optional[int] = ..., finished: _Optional[bool] = ..., weights: _Optional[_Iterable[bytes]] = ..., numerics: _Optional[str] = ..., mixed_numerics: _Optional[bool] = ..., end: _Optional[_Union[RequestFinished, _Mapping]] = ...) -> None: ...

class TextOptions(_message.Message):
    __slots__ = ("stop", "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "detokenize", "stream_interval")
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    detokenize: bool
    stream_interval: int
    def __init__(self, stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., spaces_between_special_tokens: _Optional[bool] = ..., detokenize: _Optional[bool] = ..., stream_interval: _Optional[int] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("slot", "request_id", "tenant", "positions", "num_samples", "fingerprint", "from_copy")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    FROM_COPY_FIELD_NUMBER: _ClassVar[int]
    slot: int
    request_id: str
    tenant: str
    positions: _containers.RepeatedCompositeFieldContainer[SamplePosition]
    num_samples: int
    fingerprint: bytes
    from_copy: bool
    def __init__(self, slot: _Optional[int] = ..., request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[SamplePosition, _Mapping]]] = ..., num_samples: _Optional[int] = ..., fingerprint: _Optional[bytes] = ..., from_copy: _Optional[bool] = ...) -> None: ...

class SamplePosition(_message.Message):
    __slots__ = ("sample_index", "num_tokens", "emitted_text_bytes")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EMITTED_TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    num_tokens: int
    emitted_text_bytes: int
    def __init__(self, sample_index: _Optional[int] = ..., num_tokens: _Optional[int] = ..., emitted_text_bytes: _Optional[int] = ...) -> None: ...

class ProcessFrame(_message.Message):
    __slots__ = ("hello", "slot", "text", "token_index", "num_tokens", "token_ids", "finished", "logprobs", "engine_death_slots", "sample_index", "leaving", "pooled", "weights", "found_slots")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_DEATH_SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FOUND_SLOTS_FIELD_NUMBER: _ClassVar[int]
    hello: _types_pb2.Hello
    slot: _containers.RepeatedScalarFieldContainer[int]
    text: _containers.RepeatedScalarFieldContainer[str]
    token_index: _containers.RepeatedScalarFieldContainer[int]
    num_tokens: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedCompositeFieldContainer[RequestFinished]
    logprobs: _containers.RepeatedCompositeFieldContainer[SlotTextLogprobs]
    engine_death_slots: _containers.RepeatedScalarFieldContainer[int]
    sample_index: _containers.RepeatedScalarFieldContainer[int]
    leaving: bool
    pooled: _containers.RepeatedCompositeFieldContainer[_types_pb2.Pooled]
    weights: _containers.RepeatedCompositeFieldContainer[SampleWeights]
    found_slots: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, hello: _Optional[_Union[_types_pb2.Hello, _Mapping]] = ..., slot: _Optional[_Iterable[int]] = ..., text: _Optional[_Iterable[str]] = ..., token_index: _Optional[_Iterable[int]] = ..., num_tokens: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[_Union[RequestFinished, _Mapping]]] = ..., logprobs: _Optional[_Iterable[_Union[SlotTextLogprobs, _Mapping]]] = ..., engine_death_slots: _Optional[_Iterable[int]] = ..., sample_index: _Optional[_Iterable[int]] = ..., leaving: _Optional[bool] = ..., pooled: _Optional[_Iterable[_Union[_types_pb2.Pooled, _Mapping]]] = ..., weights: _Optional[_Iterable[_Union[SampleWeights, _Mapping]]] = ..., found_slots: _Optional[_Iterable[int]] = ...) -> None: ...

class SampleWeights(_message.Message):
    __slots__ = ("slot", "sample_index", "weights", "numerics", "mixed_numerics")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MIXED_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    slot: int
    sample_index: int
    weights: _containers.RepeatedScalarFieldContainer[bytes]
    numerics: str
    mixed_numerics: bool
    def __init__(self, slot: _Optional[int] = ..., sample_index: _Optional[int] = ..., weights: _Optional[_Iterable[bytes]] = ..., numerics: _Optional[str] = ..., mixed_numerics: _Optional[bool] = ...) -> None: ...

class RequestFinished(_message.Message):
    __slots__ = ("slot", "reason", "stop_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "attempts", "timeline", "error", "sample_index", "routed_experts", "kv", "weights_version", "numerics", "is_copied")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    IS_COPIED_FIELD_NUMBER: _ClassVar[int]
    slot: int
    reason: _types_pb2.FinishReason
    stop_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    attempts: int
    timeline: _types_pb2.Timeline
    error: _types_pb2.Error
    sample_index: int
    routed_experts: _types_pb2.RoutedExperts
    kv: _engine_pb2.KVSource
    weights_version: str
    numerics: str
    is_copied: bool
    def __init__(self, slot: _Optional[int] = ..., reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., timeline: _Optional[_Union[_types_pb2.Timeline, _Mapping]] = ..., error: _Optional[_Union[_types_pb2.Error, _Mapping]] = ..., sample_index: _Optional[int] = ..., routed_experts: _Optional[_Union[_types_pb2.RoutedExperts, _Mapping]] = ..., kv: _Optional[_Union[_engine_pb2.KVSource, _Mapping]] = ..., weights_version: _Optional[str] = ..., numerics: _Optional[str] = ..., is_copied: _Optional[bool] = ...) -> None: ...

class SlotTextLogprobs(_message.Message):
    __slots__ = ("slot", "prompt", "token_index", "logprobs", "sampled_text", "token_text", "sample_index", "first_text")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_TEXT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FIRST_TEXT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    prompt: bool
    token_index: int
    logprobs: _types_pb2.Logprobs
    sampled_text: _containers.RepeatedScalarFieldContainer[bytes]
    token_text: _containers.RepeatedScalarFieldContainer[bytes]
    sample_index: int
    first_text: bytes
    def __init__(self, slot: _Optional[int] = ..., prompt: _Optional[bool] = ..., token_index: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ..., sampled_text: _Optional[_Iterable[bytes]] = ..., token_text: _Optional[_Iterable[bytes]] = ..., sample_index: _Optional[int] = ..., first_text: _Optional[bytes] = ...) -> None: ...

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENGINE_ROLE_UNSPECIFIED: _ClassVar[EngineRole]
    ENGINE_ROLE_BOTH: _ClassVar[EngineRole]
    ENGINE_ROLE_PREFILL: _ClassVar[EngineRole]
    ENGINE_ROLE_DECODE: _ClassVar[EngineRole]
    ENGINE_ROLE_ENCODE: _ClassVar[EngineRole]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_REPETITION: _ClassVar[FinishReason]
    FINISH_REASON_PREFILLED: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
    MEDIA_KIND_AUDIO: _ClassVar[MediaKind]
    MEDIA_KIND_VIDEO: _ClassVar[MediaKind]

class ReasoningStart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASONING_START_UNSPECIFIED: _ClassVar[ReasoningStart]
    REASONING_START_NONE: _ClassVar[ReasoningStart]
    REASONING_START_OPEN: _ClassVar[ReasoningStart]
    REASONING_START_CLOSED: _ClassVar[ReasoningStart]

class PoolingTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_TASK_UNSPECIFIED: _ClassVar[PoolingTask]
    POOLING_TASK_EMBED: _ClassVar[PoolingTask]
    POOLING_TASK_CLASSIFY: _ClassVar[PoolingTask]
    POOLING_TASK_SCORE: _ClassVar[PoolingTask]
    POOLING_TASK_TOKEN_EMBED: _ClassVar[PoolingTask]
    POOLING_TASK_TOKEN_CLASSIFY: _ClassVar[PoolingTask]
    POOLING_TASK_ALIGN: _ClassVar[PoolingTask]

class ReasoningMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REASONING_MODE_UNSPECIFIED: _ClassVar[ReasoningMode]
    REASONING_MODE_CONSTRAINED: _ClassVar[ReasoningMode]
    REASONING_MODE_FREE: _ClassVar[ReasoningMode]
ENGINE_ROLE_UNSPECIFIED: EngineRole
ENGINE_ROLE_BOTH: EngineRole
ENGINE_ROLE_PREFILL: EngineRole
ENGINE_ROLE_DECODE: EngineRole
ENGINE_ROLE_ENCODE: EngineRole
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_REPETITION: FinishReason
FINISH_REASON_PREFILLED: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind
MEDIA_KIND_AUDIO: MediaKind
MEDIA_KIND_VIDEO: MediaKind
REASONING_START_UNSPECIFIED: ReasoningStart
REASONING_START_NONE: ReasoningStart
REASONING_START_OPEN: ReasoningStart
REASONING_START_CLOSED: ReasoningStart
POOLING_TASK_UNSPECIFIED: PoolingTask
POOLING_TASK_EMBED: PoolingTask
POOLING_TASK_CLASSIFY: PoolingTask
POOLING_TASK_SCORE: PoolingTask
POOLING_TASK_TOKEN_EMBED: PoolingTask
POOLING_TASK_TOKEN_CLASSIFY: PoolingTask
POOLING_TASK_ALIGN: PoolingTask
REASONING_MODE_UNSPECIFIED: ReasoningMode
REASONING_MODE_CONSTRAINED: ReasoningMode
REASONING_MODE_FREE: ReasoningMode

class Hello(_message.Message):
    __slots__ = ("protocol", "peer_id", "epoch", "expected_peer_id", "expected_epoch", "fingerprint", "max_message_bytes", "initial_credit", "features")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    INITIAL_CREDIT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    peer_id: str
    epoch: int
    expected_peer_id: str
    expected_epoch: int
    fingerprint: Fingerprint
    max_message_bytes: int
    initial_credit: int
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., peer_id: _Optional[str] = ..., epoch: _Optional[int] = ..., expected_peer_id: _Optional[str] = ..., expected_epoch: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., max_message_bytes: _Optional[int] = ..., initial_credit: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class Fingerprint(_message.Message):
    __slots__ = ("model", "weights", "tokenizer", "block_hash_seed", "block_size", "kv_layout", "numerics")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_SEED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: bytes
    tokenizer: bytes
    block_hash_seed: bytes
    block_size: int
    kv_layout: str
    numerics: str
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[bytes] = ..., tokenizer: _Optional[bytes] = ..., block_hash_seed: _Optional[bytes] = ..., block_size: _Optional[int] = ..., kv_layout: _Optional[str] = ..., numerics: _Optional[str] = ...) -> None: ...

class FallBack(_message.Message):
    __slots__ = ("kind", "detail")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    kind: str
    detail: str
    def __init__(self, kind: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "logprobs", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "logprob_token_ids", "repetition_detection", "structured_outputs", "skip_reading_prefix_cache", "thinking_token_budget", "return_routed_experts", "routed_experts_prompt_start", "transcript", "extra_args")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REPETITION_DETECTION_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    SKIP_READING_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    THINKING_TOKEN_BUDGET_FIELD_NUMBER: _ClassVar[int]
    RETURN_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_PROMPT_START_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_ARGS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: int
    prompt_logprobs: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    repetition_detection: RepetitionDetection
    structured_outputs: StructuredOutputs
    skip_reading_prefix_cache: bool
    thinking_token_budget: int
    return_routed_experts: bool
    routed_experts_prompt_start: int
    transcript: TranscriptRules
    extra_args: str
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ..., repetition_detection: _Optional[_Union[RepetitionDetection, _Mapping]] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., skip_reading_prefix_cache: _Optional[bool] = ..., thinking_token_budget: _Optional[int] = ..., return_routed_experts: _Optional[bool] = ..., routed_experts_prompt_start: _Optional[int] = ..., transcript: _Optional[_Union[TranscriptRules, _Mapping]] = ..., extra_args: _Optional[str] = ...) -> None: ...

class TranscriptRules(_message.Message):
    __slots__ = ("suppressed_token_ids", "begin_suppressed_token_ids", "timestamps")
    SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESSED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    begin_suppressed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    timestamps: TimestampRules
    def __init__(self, suppressed_token_ids: _Optional[_Iterable[int]] = ..., begin_suppressed_token_ids: _Optional[_Iterable[int]] = ..., timestamps: _Optional[_Union[TimestampRules, _Mapping]] = ...) -> None: ...

class TimestampRules(_message.Message):
    __slots__ = ("first_token_id", "no_timestamps_token_id", "num_text_ids", "max_initial_index")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NO_TIMESTAMPS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TEXT_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_INITIAL_INDEX_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    no_timestamps_token_id: int
    num_text_ids: int
    max_initial_index: int
    def __init__(self, first_token_id: _Optional[int] = ..., no_timestamps_token_id: _Optional[int] = ..., num_text_ids: _Optional[int] = ..., max_initial_index: _Optional[int] = ...) -> None: ...

class RepetitionDetection(_message.Message):
    __slots__ = ("min_pattern_size", "max_pattern_size", "min_count")
    MIN_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_PATTERN_SIZE_FIELD_NUMBER: _ClassVar[int]
    MIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    min_pattern_size: int
    max_pattern_size: int
    min_count: int
    def __init__(self, min_pattern_size: _Optional[int] = ..., max_pattern_size: _Optional[int] = ..., min_count: _Optional[int] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("json", "json_object", "regex", "choice", "grammar", "structural_tag", "whitespace_pattern", "disable_any_whitespace")
    JSON_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    STRUCTURAL_TAG_FIELD_NUMBER: _ClassVar[int]
    WHITESPACE_PATTERN_FIELD_NUMBER: _ClassVar[int]
    DISABLE_ANY_WHITESPACE_FIELD_NUMBER: _ClassVar[int]
    json: str
    json_object: bool
    regex: str
    choice: Choices
    grammar: str
    structural_tag: str
    whitespace_pattern: str
    disable_any_whitespace: bool
    def __init__(self, json: _Optional[str] = ..., json_object: _Optional[bool] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ..., structural_tag: _Optional[str] = ..., whitespace_pattern: _Optional[str] = ..., disable_any_whitespace: _Optional[bool] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("token_ids", "cache_salt", "embeds", "adapter", "reasoning_start", "media", "packed_token_ids")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    REASONING_START_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: bytes
    embeds: _containers.RepeatedCompositeFieldContainer[PromptEmbeds]
    adapter: bytes
    reasoning_start: ReasoningStart
    media: _containers.RepeatedCompositeFieldContainer[MediaItem]
    packed_token_ids: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[bytes] = ..., embeds: _Optional[_Iterable[_Union[PromptEmbeds, _Mapping]]] = ..., adapter: _Optional[bytes] = ..., reasoning_start: _Optional[_Union[ReasoningStart, str]] = ..., media: _Optional[_Iterable[_Union[MediaItem, _Mapping]]] = ..., packed_token_ids: _Optional[bytes] = ...) -> None: ...

class MediaItem(_message.Message):
    __slots__ = ("key", "kind", "num_rows", "levels", "grid_t", "grid_h", "grid_w", "is_whole", "runs", "encoder", "digest", "options_json", "index", "num_in_prompt", "frame_step")
    KEY_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    LEVELS_FIELD_NUMBER: _ClassVar[int]
    GRID_T_FIELD_NUMBER: _ClassVar[int]
    GRID_H_FIELD_NUMBER: _ClassVar[int]
    GRID_W_FIELD_NUMBER: _ClassVar[int]
    IS_WHOLE_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_PROMPT_FIELD_NUMBER: _ClassVar[int]
    FRAME_STEP_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    kind: MediaKind
    num_rows: int
    levels: int
    grid_t: int
    grid_h: int
    grid_w: int
    is_whole: bool
    runs: _containers.RepeatedCompositeFieldContainer[MediaRun]
    encoder: str
    digest: bytes
    options_json: bytes
    index: int
    num_in_prompt: int
    frame_step: float
    def __init__(self, key: _Optional[bytes] = ..., kind: _Optional[_Union[MediaKind, str]] = ..., num_rows: _Optional[int] = ..., levels: _Optional[int] = ..., grid_t: _Optional[int] = ..., grid_h: _Optional[int] = ..., grid_w: _Optional[int] = ..., is_whole: _Optional[bool] = ..., runs: _Optional[_Iterable[_Union[MediaRun, _Mapping]]] = ..., encoder: _Optional[str] = ..., digest: _Optional[bytes] = ..., options_json: _Optional[bytes] = ..., index: _Optional[int] = ..., num_in_prompt: _Optional[int] = ..., frame_step: _Optional[float] = ...) -> None: ...

class MediaRun(_message.Message):
    __slots__ = ("position", "num_tokens", "row_offset")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROW_OFFSET_FIELD_NUMBER: _ClassVar[int]
    position: int
    num_tokens: int
    row_offset: int
    def __init__(self, position: _Optional[int] = ..., num_tokens: _Optional[int] = ..., row_offset: _Optional[int] = ...) -> None: ...

class PromptEmbeds(_message.Message):
    __slots__ = ("position", "num_tokens", "rows")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    position: int
    num_tokens: int
    rows: bytes
    def __init__(self, position: _Optional[int] = ..., num_tokens: _Optional[int] = ..., rows: _Optional[bytes] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("digest", "name", "pinned", "path")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    name: str
    pinned: bool
    path: str
    def __init__(self, digest: _Optional[bytes] = ..., name: _Optional[str] = ..., pinned: _Optional[bool] = ..., path: _Optional[str] = ...) -> None: ...

class PoolingParams(_message.Message):
    __slots__ = ("task", "dimensions", "use_activation", "first_part_tokens", "late_interaction", "skipped_tokens", "aligned_rows")
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LATE_INTERACTION_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ALIGNED_ROWS_FIELD_NUMBER: _ClassVar[int]
    task: PoolingTask
    dimensions: int
    use_activation: bool
    first_part_tokens: int
    late_interaction: LateInteraction
    skipped_tokens: int
    aligned_rows: int
    def __init__(self, task: _Optional[_Union[PoolingTask, str]] = ..., dimensions: _Optional[int] = ..., use_activation: _Optional[bool] = ..., first_part_tokens: _Optional[int] = ..., late_interaction: _Optional[_Union[LateInteraction, _Mapping]] = ..., skipped_tokens: _Optional[int] = ..., aligned_rows: _Optional[int] = ...) -> None: ...

class LateInteraction(_message.Message):
    __slots__ = ("query_id", "num_documents")
    QUERY_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    query_id: str
    num_documents: int
    def __init__(self, query_id: _Optional[str] = ..., num_documents: _Optional[int] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("slot", "shape", "offset", "data")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    slot: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    def __init__(self, slot: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Logprobs(_message.Message):
    __slots__ = ("sampled", "rank", "top", "token_id", "logprob")
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    sampled: _containers.RepeatedScalarFieldContainer[float]
    rank: _containers.RepeatedScalarFieldContainer[int]
    top: int
    token_id: _containers.RepeatedScalarFieldContainer[int]
    logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sampled: _Optional[_Iterable[float]] = ..., rank: _Optional[_Iterable[int]] = ..., top: _Optional[int] = ..., token_id: _Optional[_Iterable[int]] = ..., logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class Timeline(_message.Message):
    __slots__ = ("placement_ns", "queued_ns", "prefill_ns", "kv_transfer_ns", "decode_ns", "detokenize_ns", "prefill_engine", "decode_engine", "tokenize_ns", "drafts", "past_tokens", "kv_elsewhere", "mixed_numerics", "kv_from_store", "moves", "cpu")
    PLACEMENT_NS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NS_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_NS_FIELD_NUMBER: _ClassVar[int]
    DECODE_NS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ENGINE_FIELD_NUMBER: _ClassVar[int]
    DECODE_ENGINE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZE_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PAST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_ELSEWHERE_FIELD_NUMBER: _ClassVar[int]
    MIXED_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    KV_FROM_STORE_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    placement_ns: int
    queued_ns: int
    prefill_ns: int
    kv_transfer_ns: int
    decode_ns: int
    detokenize_ns: int
    prefill_engine: str
    decode_engine: str
    tokenize_ns: int
    drafts: DraftCounts
    past_tokens: int
    kv_elsewhere: bool
    mixed_numerics: bool
    kv_from_store: bool
    moves: int
    cpu: CpuTimes
    def __init__(self, placement_ns: _Optional[int] = ..., queued_ns: _Optional[int] = ..., prefill_ns: _Optional[int] = ..., kv_transfer_ns: _Optional[int] = ..., decode_ns: _Optional[int] = ..., detokenize_ns: _Optional[int] = ..., prefill_engine: _Optional[str] = ..., decode_engine: _Optional[str] = ..., tokenize_ns: _Optional[int] = ..., drafts: _Optional[_Union[DraftCounts, _Mapping]] = ..., past_tokens: _Optional[int] = ..., kv_elsewhere: _Optional[bool] = ..., mixed_numerics: _Optional[bool] = ..., kv_from_store: _Optional[bool] = ..., moves: _Optional[int] = ..., cpu: _Optional[_Union[CpuTimes, _Mapping]] = ...) -> None: ...

class CpuTimes(_message.Message):
    __slots__ = ("gateway_ns", "tokenizer_ns", "output_processor_ns", "engine_ns")
    GATEWAY_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_NS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_PROCESSOR_NS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NS_FIELD_NUMBER: _ClassVar[int]
    gateway_ns: int
    tokenizer_ns: int
    output_processor_ns: int
    engine_ns: int
    def __init__(self, gateway_ns: _Optional[int] = ..., tokenizer_ns: _Optional[int] = ..., output_processor_ns: _Optional[int] = ..., engine_ns: _Optional[int] = ...) -> None: ...

class ModelLimits(_message.Message):
    __slots__ = ("max_model_len", "vocab_size", "max_logprobs", "priorities", "hidden_size", "reasoning", "experts_per_token", "pooling_tasks", "generates", "matryoshka", "max_lora_rank", "class_labels", "media_kinds", "max_images_per_prompt", "max_media_rows", "cross_media_rows", "max_sounds_per_prompt", "argument_schemas", "max_videos_per_prompt")
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITIES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    EXPERTS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    POOLING_TASKS_FIELD_NUMBER: _ClassVar[int]
    GENERATES_FIELD_NUMBER: _ClassVar[int]
    MATRYOSHKA_FIELD_NUMBER: _ClassVar[int]
    MAX_LORA_RANK_FIELD_NUMBER: _ClassVar[int]
    CLASS_LABELS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_KINDS_FIELD_NUMBER: _ClassVar[int]
    MAX_IMAGES_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    MAX_MEDIA_ROWS_FIELD_NUMBER: _ClassVar[int]
    CROSS_MEDIA_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_SOUNDS_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    ARGUMENT_SCHEMAS_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEOS_PER_PROMPT_FIELD_NUMBER: _ClassVar[int]
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    priorities: bool
    hidden_size: int
    reasoning: ReasoningMode
    experts_per_token: int
    pooling_tasks: _containers.RepeatedScalarFieldContainer[PoolingTask]
    generates: bool
    matryoshka: bool
    max_lora_rank: int
    class_labels: _containers.RepeatedScalarFieldContainer[str]
    media_kinds: _containers.RepeatedScalarFieldContainer[MediaKind]
    max_images_per_prompt: int
    max_media_rows: int
    cross_media_rows: int
    max_sounds_per_prompt: int
    argument_schemas: _containers.RepeatedScalarFieldContainer[str]
    max_videos_per_prompt: int
    def __init__(self, max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., max_logprobs: _Optional[int] = ..., priorities: _Optional[bool] = ..., hidden_size: _Optional[int] = ..., reasoning: _Optional[_Union[ReasoningMode, str]] = ..., experts_per_token: _Optional[int] = ..., pooling_tasks: _Optional[_Iterable[_Union[PoolingTask, str]]] = ..., generates: _Optional[bool] = ..., matryoshka: _Optional[bool] = ..., max_lora_rank: _Optional[int] = ..., class_labels: _Optional[_Iterable[str]] = ..., media_kinds: _Optional[_Iterable[_Union[MediaKind, str]]] = ..., max_images_per_prompt: _Optional[int] = ..., max_media_rows: _Optional[int] = ..., cross_media_rows: _Optional[int] = ..., max_sounds_per_prompt: _Optional[int] = ..., argument_schemas: _Optional[_Iterable[str]] = ..., max_videos_per_prompt: _Optional[int] = ...) -> None: ...

class RoutedExperts(_message.Message):
    __slots__ = ("start", "num_layers", "top_k", "id_bytes", "expert_ids")
    START_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    ID_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IDS_FIELD_NUMBER: _ClassVar[int]
    start: int
    num_layers: int
    top_k: int
    id_bytes: int
    expert_ids: bytes
    def __init__(self, start: _Optional[int] = ..., num_layers: _Optional[int] = ..., top_k: _Optional[int] = ..., id_bytes: _Optional[int] = ..., expert_ids: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "reason", "field", "retry_after")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    reason: str
    field: str
    retry_after: _duration_pb2.Duration
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., reason: _Optional[str] = ..., field: _Optional[str] = ..., retry_after: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import struct_pb2 as _struct_pb2
from tokenloom.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoiceMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_MODE_UNSPECIFIED: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_NONE: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_AUTO: _ClassVar[ToolChoiceMode]
    TOOL_CHOICE_MODE_REQUIRED: _ClassVar[ToolChoiceMode]

class MissCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MISS_CAUSE_UNSPECIFIED: _ClassVar[MissCause]
    MISS_CAUSE_NEW_PREFIX: _ClassVar[MissCause]
    MISS_CAUSE_MESSAGE_CHANGED: _ClassVar[MissCause]
    MISS_CAUSE_TOOLS_CHANGED: _ClassVar[MissCause]
    MISS_CAUSE_TEMPLATE_CHANGED: _ClassVar[MissCause]
    MISS_CAUSE_VOLATILE_LINE: _ClassVar[MissCause]
    MISS_CAUSE_REASONING_DROPPED: _ClassVar[MissCause]
    MISS_CAUSE_ARGUMENTS_RESERIALISED: _ClassVar[MissCause]
    MISS_CAUSE_RETOKENISED: _ClassVar[MissCause]
    MISS_CAUSE_BLANKS_CHANGED: _ClassVar[MissCause]
    MISS_CAUSE_SALT_CHANGED: _ClassVar[MissCause]
    MISS_CAUSE_ADAPTER_CHANGED: _ClassVar[MissCause]
    MISS_CAUSE_EVICTED: _ClassVar[MissCause]
    MISS_CAUSE_OTHER_ENGINE: _ClassVar[MissCause]
TOOL_CHOICE_MODE_UNSPECIFIED: ToolChoiceMode
TOOL_CHOICE_MODE_NONE: ToolChoiceMode
TOOL_CHOICE_MODE_AUTO: ToolChoiceMode
TOOL_CHOICE_MODE_REQUIRED: ToolChoiceMode
MISS_CAUSE_UNSPECIFIED: MissCause
MISS_CAUSE_NEW_PREFIX: MissCause
MISS_CAUSE_MESSAGE_CHANGED: MissCause
MISS_CAUSE_TOOLS_CHANGED: MissCause
MISS_CAUSE_TEMPLATE_CHANGED: MissCause
MISS_CAUSE_VOLATILE_LINE: MissCause
MISS_CAUSE_REASONING_DROPPED: MissCause
MISS_CAUSE_ARGUMENTS_RESERIALISED: MissCause
MISS_CAUSE_RETOKENISED: MissCause
MISS_CAUSE_BLANKS_CHANGED: MissCause
MISS_CAUSE_SALT_CHANGED: MissCause
MISS_CAUSE_ADAPTER_CHANGED: MissCause
MISS_CAUSE_EVICTED: MissCause
MISS_CAUSE_OTHER_ENGINE: MissCause

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "token_ids", "chat", "parts", "sampling_params", "stop", "include_stop_str_in_output", "skip_special_tokens", "user_request_id", "priority", "ignore_eos", "return_timeline", "n", "bad_words", "spaces_between_special_tokens", "detokenize", "stream_interval", "truncate_prompt_tokens", "add_special_tokens", "return_prompt_token_ids", "beam_search", "resumable", "data_parallel_rank", "continued_turn", "session", "keep_seconds", "ttft_deadline")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_STR_IN_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USER_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TIMELINE_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    SPACES_BETWEEN_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DETOKENIZE_FIELD_NUMBER: _ClassVar[int]
    STREAM_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_TURN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    KEEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TTFT_DEADLINE_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    token_ids: _types_pb2.TokenIds
    chat: ChatPrompt
    parts: PromptParts
    sampling_params: _types_pb2.SamplingParams
    stop: _containers.RepeatedScalarFieldContainer[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    user_request_id: str
    priority: int
    ignore_eos: bool
    return_timeline: bool
    n: int
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    spaces_between_special_tokens: bool
    detokenize: bool
    stream_interval: int
    truncate_prompt_tokens: int
    add_special_tokens: bool
    return_prompt_token_ids: bool
    beam_search: BeamSearch
    resumable: bool
    data_parallel_rank: int
    continued_turn: TurnPosition
    session: str
    keep_seconds: int
    ttft_deadline: _duration_pb2.Duration
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., parts: _Optional[_Union[PromptParts, _Mapping]] = ..., sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Iterable[str]] = ..., include_stop_str_in_output: _Optional[bool] = ..., skip_special_tokens: _Optional[bool] = ..., user_request_id: _Optional[str] = ..., priority: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., return_timeline: _Optional[bool] = ..., n: _Optional[int] = ..., bad_words: _Optional[_Iterable[str]] = ..., spaces_between_special_tokens: _Optional[bool] = ..., detokenize: _Optional[bool] = ..., stream_interval: _Optional[int] = ..., truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ..., return_prompt_token_ids: _Optional[bool] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ..., resumable: _Optional[bool] = ..., data_parallel_rank: _Optional[int] = ..., continued_turn: _Optional[_Union[TurnPosition, _Mapping]] = ..., session: _Optional[str] = ..., keep_seconds: _Optional[int] = ..., ttft_deadline: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class TurnPosition(_message.Message):
    __slots__ = ("request_id", "position")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: OutputPosition
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[_Union[OutputPosition, _Mapping]] = ...) -> None: ...

class InferenceResumeRequest(_message.Message):
    __slots__ = ("request", "request_id", "positions")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    request_id: str
    positions: _containers.RepeatedCompositeFieldContainer[OutputPosition]
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., request_id: _Optional[str] = ..., positions: _Optional[_Iterable[_Union[OutputPosition, _Mapping]]] = ...) -> None: ...

class OutputPosition(_message.Message):
    __slots__ = ("index", "num_tokens", "text_length", "finished", "num_prompt_logprobs")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    index: int
    num_tokens: int
    text_length: int
    finished: bool
    num_prompt_logprobs: int
    def __init__(self, index: _Optional[int] = ..., num_tokens: _Optional[int] = ..., text_length: _Optional[int] = ..., finished: _Optional[bool] = ..., num_prompt_logprobs: _Optional[int] = ...) -> None: ...

class InferenceCancelRequest(_message.Message):
    __slots__ = ("request_id", "idempotency_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDEMPOTENCY_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    idempotency_key: str
    def __init__(self, request_id: _Optional[str] = ..., idempotency_key: _Optional[str] = ...) -> None: ...

class InferenceCancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("length_penalty",)
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    length_penalty: float
    def __init__(self, length_penalty: _Optional[float] = ...) -> None: ...

class PromptParts(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[PromptPart]
    def __init__(self, parts: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("token_ids", "embeds")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EMBEDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _types_pb2.TokenIds
    embeds: bytes
    def __init__(self, token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ..., embeds: _Optional[bytes] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "template_kwargs", "add_generation_prompt", "tools", "tool_choice", "parallel_tool_calls", "include_reasoning", "mm_processor_kwargs", "fps")
    class MmProcessorKwargsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_REASONING_FIELD_NUMBER: _ClassVar[int]
    MM_PROCESSOR_KWARGS_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_kwargs: _struct_pb2.Struct
    add_generation_prompt: bool
    tools: _containers.RepeatedCompositeFieldContainer[Tool]
    tool_choice: ToolChoice
    parallel_tool_calls: bool
    include_reasoning: bool
    mm_processor_kwargs: _containers.ScalarMap[str, int]
    fps: float
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_kwargs: _Optional[_Union[_struct_pb2.Struct, _Mapping]] = ..., add_generation_prompt: _Optional[bool] = ..., tools: _Optional[_Iterable[_Union[Tool, _Mapping]]] = ..., tool_choice: _Optional[_Union[ToolChoice, _Mapping]] = ..., parallel_tool_calls: _Optional[bool] = ..., include_reasoning: _Optional[bool] = ..., mm_processor_kwargs: _Optional[_Mapping[str, int]] = ..., fps: _Optional[float] = ...) -> None: ...

class Tool(_message.Message):
    __slots__ = ("function",)
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    function: Function
    def __init__(self, function: _Optional[_Union[Function, _Mapping]] = ...) -> None: ...

class Function(_message.Message):
    __slots__ = ("name", "description", "parameters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters: _Optional[str] = ...) -> None: ...

class ToolChoice(_message.Message):
    __slots__ = ("mode", "function")
    MODE_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    mode: ToolChoiceMode
    function: str
    def __init__(self, mode: _Optional[_Union[ToolChoiceMode, str]] = ..., function: _Optional[str] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning: str
    parts: _containers.RepeatedCompositeFieldContainer[ContentPart]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[ContentPart, _Mapping]]] = ...) -> None: ...

class ContentPart(_message.Message):
    __slots__ = ("text", "image", "image_url", "audio", "audio_url", "video", "video_url")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    IMAGE_URL_FIELD_NUMBER: _ClassVar[int]
    AUDIO_FIELD_NUMBER: _ClassVar[int]
    AUDIO_URL_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    VIDEO_URL_FIELD_NUMBER: _ClassVar[int]
    text: str
    image: bytes
    image_url: str
    audio: bytes
    audio_url: str
    video: bytes
    video_url: str
    def __init__(self, text: _Optional[str] = ..., image: _Optional[bytes] = ..., image_url: _Optional[str] = ..., audio: _Optional[bytes] = ..., audio_url: _Optional[str] = ..., video: _Optional[bytes] = ..., video_url: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "function")
    ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    function: FunctionCall
    def __init__(self, id: _Optional[str] = ..., function: _Optional[_Union[FunctionCall, _Mapping]] = ...) -> None: ...

class FunctionCall(_message.Message):
    __slots__ = ("name", "arguments")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arguments: str
    def __init__(self, name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("request_id", "index", "text", "token_ids", "token_index", "logprobs", "finish_reason", "stop_reason", "usage", "timeline", "prompt_logprobs", "prompt_token_ids", "reasoning", "tool_calls", "text_length", "routed_experts", "weights_version", "mixed_numerics")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIXED_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    index: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_index: int
    logprobs: _types_pb2.Logprobs
    finish_reason: _types_pb2.FinishReason
    stop_reason: str
    usage: Usage
    timeline: _types_pb2.Timeline
    prompt_logprobs: _types_pb2.Logprobs
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    text_length: int
    routed_experts: _types_pb2.RoutedExperts
    weights_version: str
    mixed_numerics: bool
    def __init__(self, request_id: _Optional[str] = ..., index: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., token_index: _Optional[int] = ..., logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_types_pb2.FinishReason, str]] = ..., stop_reason: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., timeline: _Optional[_Union[_types_pb2.Timeline, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[_types_pb2.Logprobs, _Mapping]] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., text_length: _Optional[int] = ..., routed_experts: _Optional[_Union[_types_pb2.RoutedExperts, _Mapping]] = ..., weights_version: _Optional[str] = ..., mixed_numerics: _Optional[bool] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "function")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    FUNCTION_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    function: FunctionCall
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., function: _Optional[_Union[FunctionCall, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_tokens", "reasoning_tokens", "cache_miss", "cache_write_tokens", "audio_tokens", "cpu_ns")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_MISS_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUDIO_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    cache_miss: CacheMiss
    cache_write_tokens: int
    audio_tokens: int
    cpu_ns: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., reasoning_tokens: _Optional[int] = ..., cache_miss: _Optional[_Union[CacheMiss, _Mapping]] = ..., cache_write_tokens: _Optional[int] = ..., audio_tokens: _Optional[int] = ..., cpu_ns: _Optional[int] = ...) -> None: ...

class CacheMiss(_message.Message):
    __slots__ = ("cause", "token", "missed_tokens")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    MISSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cause: MissCause
    token: int
    missed_tokens: int
    def __init__(self, cause: _Optional[_Union[MissCause, str]] = ..., token: _Optional[int] = ..., missed_tokens: _Optional[int] = ...) -> None: ...

class PoolInput(_message.Message):
    __slots__ = ("text", "token_ids")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    text: str
    token_ids: _types_pb2.TokenIds
    def __init__(self, text: _Optional[str] = ..., token_ids: _Optional[_Union[_types_pb2.TokenIds, _Mapping]] = ...) -> None: ...

class PoolInputOptions(_message.Message):
    __slots__ = ("truncate_prompt_tokens", "add_special_tokens", "priority")
    TRUNCATE_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    truncate_prompt_tokens: int
    add_special_tokens: bool
    priority: int
    def __init__(self, truncate_prompt_tokens: _Optional[int] = ..., add_special_tokens: _Optional[bool] = ..., priority: _Optional[int] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("model", "inputs", "options", "dimensions", "normalize", "prompt_name")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolInput]
    options: PoolInputOptions
    dimensions: int
    normalize: bool
    prompt_name: str
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolInput, _Mapping]]] = ..., options: _Optional[_Union[PoolInputOptions, _Mapping]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class ClassifyRequest(_message.Message):
    __slots__ = ("model", "inputs", "options", "use_activation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolInput]
    options: PoolInputOptions
    use_activation: bool
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolInput, _Mapping]]] = ..., options: _Optional[_Union[PoolInputOptions, _Mapping]] = ..., use_activation: _Optional[bool] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("model", "query", "documents", "options", "use_activation")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    QUERY_FIELD_NUMBER: _ClassVar[int]
    DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    model: str
    query: str
    documents: _containers.RepeatedScalarFieldContainer[str]
    options: PoolInputOptions
    use_activation: bool
    def __init__(self, model: _Optional[str] = ..., query: _Optional[str] = ..., documents: _Optional[_Iterable[str]] = ..., options: _Optional[_Union[PoolInputOptions, _Mapping]] = ..., use_activation: _Optional[bool] = ...) -> None: ...

class PoolRequest(_message.Message):
    __slots__ = ("model", "inputs", "options", "task", "dimensions", "use_activation", "prompt_name")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    USE_ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    model: str
    inputs: _containers.RepeatedCompositeFieldContainer[PoolInput]
    options: PoolInputOptions
    task: _types_pb2.PoolingTask
    dimensions: int
    use_activation: bool
    prompt_name: str
    def __init__(self, model: _Optional[str] = ..., inputs: _Optional[_Iterable[_Union[PoolInput, _Mapping]]] = ..., options: _Optional[_Union[PoolInputOptions, _Mapping]] = ..., task: _Optional[_Union[_types_pb2.PoolingTask, str]] = ..., dimensions: _Optional[int] = ..., use_activation: _Optional[bool] = ..., prompt_name: _Optional[str] = ...) -> None: ...

class PoolResponse(_message.Message):
    __slots__ = ("request_id", "outputs", "usage", "weights_version")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    outputs: _containers.RepeatedCompositeFieldContainer[PooledOutput]
    usage: Usage
    weights_version: str
    def __init__(self, request_id: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[PooledOutput, _Mapping]]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., weights_version: _Optional[str] = ...) -> None: ...

class PooledOutput(_message.Message):
    __slots__ = ("index", "shape", "offset", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    offset: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "max_model_len", "parent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    parent: str
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., parent: _Optional[str] = ...) -> None: ...

class TranscribeRequest(_message.Message):
    __slots__ = ("options", "data")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    options: TranscribeOptions
    data: bytes
    def __init__(self, options: _Optional[_Union[TranscribeOptions, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class TranscribeOptions(_message.Message):
    __slots__ = ("model", "translate", "language", "prompt", "temperature", "seed", "return_segments", "return_words", "return_logprobs")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TRANSLATE_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    RETURN_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    RETURN_WORDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    model: str
    translate: bool
    language: str
    prompt: str
    temperature: float
    seed: int
    return_segments: bool
    return_words: bool
    return_logprobs: bool
    def __init__(self, model: _Optional[str] = ..., translate: _Optional[bool] = ..., language: _Optional[str] = ..., prompt: _Optional[str] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., return_segments: _Optional[bool] = ..., return_words: _Optional[bool] = ..., return_logprobs: _Optional[bool] = ...) -> None: ...

class TranscribeResponse(_message.Message):
    __slots__ = ("text", "tokens", "seconds", "language", "segments", "words", "weights_version", "mixed_numerics")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIXED_NUMERICS_FIELD_NUMBER: _ClassVar[int]
    text: str
    tokens: _containers.RepeatedCompositeFieldContainer[TranscriptToken]
    seconds: float
    language: str
    segments: _containers.RepeatedCompositeFieldContainer[TranscriptSegment]
    words: _containers.RepeatedCompositeFieldContainer[TranscriptWord]
    weights_version: str
    mixed_numerics: bool
    def __init__(self, text: _Optional[str] = ..., tokens: _Optional[_Iterable[_Union[TranscriptToken, _Mapping]]] = ..., seconds: _Optional[float] = ..., language: _Optional[str] = ..., segments: _Optional[_Iterable[_Union[TranscriptSegment, _Mapping]]] = ..., words: _Optional[_Iterable[_Union[TranscriptWord, _Mapping]]] = ..., weights_version: _Optional[str] = ..., mixed_numerics: _Optional[bool] = ...) -> None: ...

class TranscriptToken(_message.Message):
    __slots__ = ("id", "text", "logprob")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: bytes
    logprob: float
    def __init__(self, id: _Optional[int] = ..., text: _Optional[bytes] = ..., logprob: _Optional[float] = ...) -> None: ...

class TranscriptSegment(_message.Message):
    __slots__ = ("start", "end", "text", "avg_logprob", "compression_ratio", "no_speech_prob")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AVG_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_RATIO_FIELD_NUMBER: _ClassVar[int]
    NO_SPEECH_PROB_FIELD_NUMBER: _ClassVar[int]
    start: float
    end: float
    text: str
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    def __init__(self, start: _Optional[float] = ..., end: _Optional[float] = ..., text: _Optional[str] = ..., avg_logprob: _Optional[float] = ..., compression_ratio: _Optional[float] = ..., no_speech_prob: _Optional[float] = ...) -> None: ...

class TranscriptWord(_message.Message):
    __slots__ = ("text", "start", "end")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    text: str
    start: float
    end: float
    def __init__(self, text: _Optional[str] = ..., start: _Optional[float] = ..., end: _Optional[float] = ...) -> None: ...

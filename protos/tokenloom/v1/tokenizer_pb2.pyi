from tokenloom.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TranscriptTask(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRANSCRIPT_TASK_UNSPECIFIED: _ClassVar[TranscriptTask]
    TRANSCRIPT_TASK_TRANSCRIBE: _ClassVar[TranscriptTask]
    TRANSCRIPT_TASK_TRANSLATE: _ClassVar[TranscriptTask]
TRANSCRIPT_TASK_UNSPECIFIED: TranscriptTask
TRANSCRIPT_TASK_TRANSCRIBE: TranscriptTask
TRANSCRIPT_TASK_TRANSLATE: TranscriptTask

class TokenizedPrompt(_message.Message):
    __slots__ = ("token_ids", "block_hash_prefixes", "token_strings", "first_part_tokens", "plain_text_tokens", "reasoning_start", "skipped_tokens", "packed_token_ids", "media")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_PREFIXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PART_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASONING_START_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PACKED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hash_prefixes: _containers.RepeatedScalarFieldContainer[int]
    token_strings: _containers.RepeatedScalarFieldContainer[str]
    first_part_tokens: int
    plain_text_tokens: _containers.RepeatedScalarFieldContainer[str]
    reasoning_start: _types_pb2.ReasoningStart
    skipped_tokens: int
    packed_token_ids: bytes
    media: _containers.RepeatedCompositeFieldContainer[_types_pb2.MediaItem]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., block_hash_prefixes: _Optional[_Iterable[int]] = ..., token_strings: _Optional[_Iterable[str]] = ..., first_part_tokens: _Optional[int] = ..., plain_text_tokens: _Optional[_Iterable[str]] = ..., reasoning_start: _Optional[_Union[_types_pb2.ReasoningStart, str]] = ..., skipped_tokens: _Optional[int] = ..., packed_token_ids: _Optional[bytes] = ..., media: _Optional[_Iterable[_Union[_types_pb2.MediaItem, _Mapping]]] = ...) -> None: ...

class EncodeRequest(_message.Message):
    __slots__ = ("texts", "add_special_tokens", "want_hashes", "cache_salt", "want_token_strings", "second_texts", "max_tokens", "keep_first", "prompt_name", "tenant", "takes_packed_ids")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WANT_HASHES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    SECOND_TEXTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIRST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_NAME_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TAKES_PACKED_IDS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    add_special_tokens: bool
    want_hashes: bool
    cache_salt: bytes
    want_token_strings: bool
    second_texts: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    keep_first: bool
    prompt_name: str
    tenant: str
    takes_packed_ids: bool
    def __init__(self, texts: _Optional[_Iterable[str]] = ..., add_special_tokens: _Optional[bool] = ..., want_hashes: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., want_token_strings: _Optional[bool] = ..., second_texts: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., keep_first: _Optional[bool] = ..., prompt_name: _Optional[str] = ..., tenant: _Optional[str] = ..., takes_packed_ids: _Optional[bool] = ...) -> None: ...

class EncodeResponse(_message.Message):
    __slots__ = ("prompts", "cpu_ns")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[TokenizedPrompt]
    cpu_ns: int
    def __init__(self, prompts: _Optional[_Iterable[_Union[TokenizedPrompt, _Mapping]]] = ..., cpu_ns: _Optional[int] = ...) -> None: ...

class EncodeChatRequest(_message.Message):
    __slots__ = ("messages_json", "tools_json", "template_kwargs_json", "add_generation_prompt", "want_hashes", "cache_salt", "want_token_strings", "continue_final_message", "tenant", "takes_packed_ids", "media", "token_ids")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    WANT_HASHES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WANT_TOKEN_STRINGS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TAKES_PACKED_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    messages_json: bytes
    tools_json: bytes
    template_kwargs_json: bytes
    add_generation_prompt: bool
    want_hashes: bool
    cache_salt: bytes
    want_token_strings: bool
    continue_final_message: bool
    tenant: str
    takes_packed_ids: bool
    media: _containers.RepeatedCompositeFieldContainer[MediaSize]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, messages_json: _Optional[bytes] = ..., tools_json: _Optional[bytes] = ..., template_kwargs_json: _Optional[bytes] = ..., add_generation_prompt: _Optional[bool] = ..., want_hashes: _Optional[bool] = ..., cache_salt: _Optional[bytes] = ..., want_token_strings: _Optional[bool] = ..., continue_final_message: _Optional[bool] = ..., tenant: _Optional[str] = ..., takes_packed_ids: _Optional[bool] = ..., media: _Optional[_Iterable[_Union[MediaSize, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class MediaSize(_message.Message):
    __slots__ = ("digest", "kind", "width", "height", "samples", "options_json", "encoder", "frames", "frame_rate")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAME_RATE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    kind: _types_pb2.MediaKind
    width: int
    height: int
    samples: int
    options_json: bytes
    encoder: str
    frames: int
    frame_rate: float
    def __init__(self, digest: _Optional[bytes] = ..., kind: _Optional[_Union[_types_pb2.MediaKind, str]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., samples: _Optional[int] = ..., options_json: _Optional[bytes] = ..., encoder: _Optional[str] = ..., frames: _Optional[int] = ..., frame_rate: _Optional[float] = ...) -> None: ...

class EncodeChatResponse(_message.Message):
    __slots__ = ("prompt", "cpu_ns")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    prompt: TokenizedPrompt
    cpu_ns: int
    def __init__(self, prompt: _Optional[_Union[TokenizedPrompt, _Mapping]] = ..., cpu_ns: _Optional[int] = ...) -> None: ...

class EncodeTranscriptRequest(_message.Message):
    __slots__ = ("language", "task", "with_timestamps", "previous_text", "sound", "start", "samples", "cache_salt", "tenant")
    LANGUAGE_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    WITH_TIMESTAMPS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_TEXT_FIELD_NUMBER: _ClassVar[int]
    SOUND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    language: str
    task: TranscriptTask
    with_timestamps: bool
    previous_text: str
    sound: MediaSize
    start: int
    samples: int
    cache_salt: bytes
    tenant: str
    def __init__(self, language: _Optional[str] = ..., task: _Optional[_Union[TranscriptTask, str]] = ..., with_timestamps: _Optional[bool] = ..., previous_text: _Optional[str] = ..., sound: _Optional[_Union[MediaSize, _Mapping]] = ..., start: _Optional[int] = ..., samples: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., tenant: _Optional[str] = ...) -> None: ...

class EncodeTranscriptResponse(_message.Message):
    __slots__ = ("prompt", "cpu_ns")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    prompt: TokenizedPrompt
    cpu_ns: int
    def __init__(self, prompt: _Optional[_Union[TokenizedPrompt, _Mapping]] = ..., cpu_ns: _Optional[int] = ...) -> None: ...

class TranscriptTraits(_message.Message):
    __slots__ = ("sampling_rate", "piece_samples", "frame_samples", "timestamp_samples", "languages", "first_timestamp_id", "no_timestamps_id", "max_initial_timestamp", "no_speech_id", "suppressed_ids", "begin_suppressed_ids", "first_special_id")
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    PIECE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    FRAME_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMP_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    LANGUAGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TIMESTAMP_ID_FIELD_NUMBER: _ClassVar[int]
    NO_TIMESTAMPS_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_INITIAL_TIMESTAMP_FIELD_NUMBER: _ClassVar[int]
    NO_SPEECH_ID_FIELD_NUMBER: _ClassVar[int]
    SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    BEGIN_SUPPRESSED_IDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_SPECIAL_ID_FIELD_NUMBER: _ClassVar[int]
    sampling_rate: int
    piece_samples: int
    frame_samples: int
    timestamp_samples: int
    languages: _containers.RepeatedCompositeFieldContainer[TranscriptLanguage]
    first_timestamp_id: int
    no_timestamps_id: int
    max_initial_timestamp: int
    no_speech_id: int
    suppressed_ids: _containers.RepeatedScalarFieldContainer[int]
    begin_suppressed_ids: _containers.RepeatedScalarFieldContainer[int]
    first_special_id: int
    def __init__(self, sampling_rate: _Optional[int] = ..., piece_samples: _Optional[int] = ..., frame_samples: _Optional[int] = ..., timestamp_samples: _Optional[int] = ..., languages: _Optional[_Iterable[_Union[TranscriptLanguage, _Mapping]]] = ..., first_timestamp_id: _Optional[int] = ..., no_timestamps_id: _Optional[int] = ..., max_initial_timestamp: _Optional[int] = ..., no_speech_id: _Optional[int] = ..., suppressed_ids: _Optional[_Iterable[int]] = ..., begin_suppressed_ids: _Optional[_Iterable[int]] = ..., first_special_id: _Optional[int] = ...) -> None: ...

class TranscriptLanguage(_message.Message):
    __slots__ = ("code", "names", "token_id")
    CODE_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    code: str
    names: _containers.RepeatedScalarFieldContainer[str]
    token_id: int
    def __init__(self, code: _Optional[str] = ..., names: _Optional[_Iterable[str]] = ..., token_id: _Optional[int] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("token_ids", "skip_special_tokens", "tenant")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    tenant: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ..., tenant: _Optional[str] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("text", "cpu_ns")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CPU_NS_FIELD_NUMBER: _ClassVar[int]
    text: str
    cpu_ns: int
    def __init__(self, text: _Optional[str] = ..., cpu_ns: _Optional[int] = ...) -> None: ...

class GetTokenizerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTokenizerInfoResponse(_message.Message):
    __slots__ = ("fingerprint", "vocab_size", "eos_token_ids", "has_chat_template", "default_sampling_params", "max_token_bytes", "tool_call_parser", "reasoning_parser", "special_marks", "tool_format_json", "max_sentence_tokens", "media_kinds", "transcript")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HAS_CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_PARAMS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_MARKS_FIELD_NUMBER: _ClassVar[int]
    TOOL_FORMAT_JSON_FIELD_NUMBER: _ClassVar[int]
    MAX_SENTENCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_KINDS_FIELD_NUMBER: _ClassVar[int]
    TRANSCRIPT_FIELD_NUMBER: _ClassVar[int]
    fingerprint: _types_pb2.Fingerprint
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    has_chat_template: bool
    default_sampling_params: _types_pb2.SamplingParams
    max_token_bytes: int
    tool_call_parser: str
    reasoning_parser: str
    special_marks: _containers.RepeatedScalarFieldContainer[str]
    tool_format_json: bytes
    max_sentence_tokens: int
    media_kinds: _containers.RepeatedScalarFieldContainer[_types_pb2.MediaKind]
    transcript: TranscriptTraits
    def __init__(self, fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., has_chat_template: _Optional[bool] = ..., default_sampling_params: _Optional[_Union[_types_pb2.SamplingParams, _Mapping]] = ..., max_token_bytes: _Optional[int] = ..., tool_call_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., special_marks: _Optional[_Iterable[str]] = ..., tool_format_json: _Optional[bytes] = ..., max_sentence_tokens: _Optional[int] = ..., media_kinds: _Optional[_Iterable[_Union[_types_pb2.MediaKind, str]]] = ..., transcript: _Optional[_Union[TranscriptTraits, _Mapping]] = ...) -> None: ...

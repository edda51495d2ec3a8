import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AcquireRequest(_message.Message):
    __slots__ = ("lease_id", "engine_epoch", "kv_layout", "prompt_digest", "skip_tokens", "transports", "weights")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SKIP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: bytes
    engine_epoch: int
    kv_layout: str
    prompt_digest: bytes
    skip_tokens: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    weights: bytes
    def __init__(self, lease_id: _Optional[bytes] = ..., engine_epoch: _Optional[int] = ..., kv_layout: _Optional[str] = ..., prompt_digest: _Optional[bytes] = ..., skip_tokens: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., weights: _Optional[bytes] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("acquisition_id", "transport", "endpoint", "block_ids", "generations", "checksums", "ttl", "divided_layout")
    ACQUISITION_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    DIVIDED_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    acquisition_id: bytes
    transport: str
    endpoint: bytes
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    generations: _containers.RepeatedScalarFieldContainer[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    ttl: _duration_pb2.Duration
    divided_layout: str
    def __init__(self, acquisition_id: _Optional[bytes] = ..., transport: _Optional[str] = ..., endpoint: _Optional[bytes] = ..., block_ids: _Optional[_Iterable[int]] = ..., generations: _Optional[_Iterable[int]] = ..., checksums: _Optional[_Iterable[int]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., divided_layout: _Optional[str] = ...) -> None: ...

class ProgressRequest(_message.Message):
    __slots__ = ("acquisition_id", "engine_epoch")
    ACQUISITION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    acquisition_id: bytes
    engine_epoch: int
    def __init__(self, acquisition_id: _Optional[bytes] = ..., engine_epoch: _Optional[int] = ...) -> None: ...

class ProgressResponse(_message.Message):
    __slots__ = ("tokens_ready", "layers_ready", "chunk_tokens")
    TOKENS_READY_FIELD_NUMBER: _ClassVar[int]
    LAYERS_READY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens_ready: int
    layers_ready: int
    chunk_tokens: int
    def __init__(self, tokens_ready: _Optional[int] = ..., layers_ready: _Optional[int] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("acquisition_id", "engine_epoch")
    ACQUISITION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    acquisition_id: bytes
    engine_epoch: int
    def __init__(self, acquisition_id: _Optional[bytes] = ..., engine_epoch: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("ttl",)
    TTL_FIELD_NUMBER: _ClassVar[int]
    ttl: _duration_pb2.Duration
    def __init__(self, ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("acquisition_id", "engine_epoch", "generations")
    ACQUISITION_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    acquisition_id: bytes
    engine_epoch: int
    generations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, acquisition_id: _Optional[bytes] = ..., engine_epoch: _Optional[int] = ..., generations: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("valid", "reason", "checksums")
    VALID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    reason: str
    checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, valid: _Optional[bool] = ..., reason: _Optional[str] = ..., checksums: _Optional[_Iterable[int]] = ...) -> None: ...

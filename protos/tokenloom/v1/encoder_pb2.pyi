import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from tokenloom.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROW_TYPE_UNSPECIFIED: _ClassVar[RowType]
    ROW_TYPE_BFLOAT16: _ClassVar[RowType]
    ROW_TYPE_FLOAT32: _ClassVar[RowType]
ROW_TYPE_UNSPECIFIED: RowType
ROW_TYPE_BFLOAT16: RowType
ROW_TYPE_FLOAT32: RowType

class PutRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("tenant", "cache_salt", "kind", "digest", "num_bytes", "request_id", "url")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    cache_salt: bytes
    kind: _types_pb2.MediaKind
    digest: bytes
    num_bytes: int
    request_id: str
    url: str
    def __init__(self, tenant: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., kind: _Optional[_Union[_types_pb2.MediaKind, str]] = ..., digest: _Optional[bytes] = ..., num_bytes: _Optional[int] = ..., request_id: _Optional[str] = ..., url: _Optional[str] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("digest", "width", "height", "samples", "num_bytes", "frames", "frame_rate")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    FRAME_RATE_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    width: int
    height: int
    samples: int
    num_bytes: int
    frames: int
    frame_rate: float
    def __init__(self, digest: _Optional[bytes] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., samples: _Optional[int] = ..., num_bytes: _Optional[int] = ..., frames: _Optional[int] = ..., frame_rate: _Optional[float] = ...) -> None: ...

class HasRequest(_message.Message):
    __slots__ = ("tenant", "cache_salt", "digest", "request_id", "kind")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    cache_salt: bytes
    digest: _containers.RepeatedScalarFieldContainer[bytes]
    request_id: str
    kind: _types_pb2.MediaKind
    def __init__(self, tenant: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., digest: _Optional[_Iterable[bytes]] = ..., request_id: _Optional[str] = ..., kind: _Optional[_Union[_types_pb2.MediaKind, str]] = ...) -> None: ...

class HasResponse(_message.Message):
    __slots__ = ("has", "facts")
    HAS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    has: _containers.RepeatedScalarFieldContainer[bool]
    facts: _containers.RepeatedCompositeFieldContainer[PutResponse]
    def __init__(self, has: _Optional[_Iterable[bool]] = ..., facts: _Optional[_Iterable[_Union[PutResponse, _Mapping]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("item", "tenant", "cache_salt", "first_row", "timeout")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    item: _types_pb2.MediaItem
    tenant: str
    cache_salt: bytes
    first_row: int
    timeout: _duration_pb2.Duration
    def __init__(self, item: _Optional[_Union[_types_pb2.MediaItem, _Mapping]] = ..., tenant: _Optional[str] = ..., cache_salt: _Optional[bytes] = ..., first_row: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class RowChunk(_message.Message):
    __slots__ = ("first_row", "num_rows", "width", "rows", "type")
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    first_row: int
    num_rows: int
    width: int
    rows: bytes
    type: RowType
    def __init__(self, first_row: _Optional[int] = ..., num_rows: _Optional[int] = ..., width: _Optional[int] = ..., rows: _Optional[bytes] = ..., type: _Optional[_Union[RowType, str]] = ...) -> None: ...

class ReleaseFilesRequest(_message.Message):
    __slots__ = ("request_id", "tenant")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class ReleaseFilesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetCachesRequest(_message.Message):
    __slots__ = ("files",)
    FILES_FIELD_NUMBER: _ClassVar[int]
    files: bool
    def __init__(self, files: _Optional[bool] = ...) -> None: ...

class ResetCachesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEncoderInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEncoderInfoResponse(_message.Message):
    __slots__ = ("fingerprint", "processor", "media_kinds", "max_file_bytes", "max_pixels", "row_width", "row_type", "lease", "fetches", "encoded", "sampling_rate", "max_piece_samples", "max_video_bytes")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    MEDIA_KINDS_FIELD_NUMBER: _ClassVar[int]
    MAX_FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    ROW_WIDTH_FIELD_NUMBER: _ClassVar[int]
    ROW_TYPE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_RATE_FIELD_NUMBER: _ClassVar[int]
    MAX_PIECE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIDEO_BYTES_FIELD_NUMBER: _ClassVar[int]
    fingerprint: _types_pb2.Fingerprint
    processor: bytes
    media_kinds: _containers.RepeatedScalarFieldContainer[_types_pb2.MediaKind]
    max_file_bytes: int
    max_pixels: int
    row_width: int
    row_type: RowType
    lease: _duration_pb2.Duration
    fetches: bool
    encoded: int
    sampling_rate: int
    max_piece_samples: int
    max_video_bytes: int
    def __init__(self, fingerprint: _Optional[_Union[_types_pb2.Fingerprint, _Mapping]] = ..., processor: _Optional[bytes] = ..., media_kinds: _Optional[_Iterable[_Union[_types_pb2.MediaKind, str]]] = ..., max_file_bytes: _Optional[int] = ..., max_pixels: _Optional[int] = ..., row_width: _Optional[int] = ..., row_type: _Optional[_Union[RowType, str]] = ..., lease: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., fetches: _Optional[bool] = ..., encoded: _Optional[int] = ..., sampling_rate: _Optional[int] = ..., max_piece_samples: _Optional[int] = ..., max_video_bytes: _Optional[int] = ...) -> None: ...

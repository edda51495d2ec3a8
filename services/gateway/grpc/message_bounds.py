"""Counts the fields of a large gRPC message before it is decoded: an empty element takes two bytes on the wire, and a
hundred in memory. And counts and records calls, answered or refused.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from tokenloom.request import errors
from tokenloom.request.errors import InvalidArgument
from tokenloom.services.runtime.host.servicer_edge import ObserveCall, ObserveEnd

from ..http.response_counts import ResponseCounts
from ..request_log.access_log import FinishedRequests
from ..request_log.finished_request import CURRENT_RECORD, RequestRecord
from ..tenants.api_keys import call_key

LARGE_BYTES = 128 << 10
"""Smaller messages are decoded without being counted."""
MAX_FIELDS = 1 << 15
"""Limits the fields of a large message, nested ones included; a packed list of token ids is one field."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

T = TypeVar("T")


def bounded(add: Callable[[T, Any], None], requests: Mapping[str, type[Message]]) -> Callable[[T, Any], None]:
    """Return a generated ``add_…Servicer_to_server`` whose methods count their requests' fields.

    ``requests``: the type of each method's requests, by the method's name.
    """
    return lambda servicer, server: add(servicer, _BoundedServer(server, requests))


class _BoundedServer:
    def __init__(self, server: Any, requests: Mapping[str, type[Message]]) -> None:
        self._server = server
        self._requests = requests

    def add_registered_method_handlers(
        self, service: str, handlers: "dict[str, grpc.RpcMethodHandler[Any, Any]]"
    ) -> None:
        replaced: dict[str, Any] = dict(handlers)
        for name, request in self._requests.items():
            handler = replaced[name]
            decode = partial(_decode, cast(Descriptor, request.DESCRIPTOR), handler.request_deserializer)
            replaced[name] = handler._replace(request_deserializer=decode)
        self._server.add_registered_method_handlers(service, replaced)

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Do nothing: generated code passes the same handlers by name too."""


def _decode(descriptor: Descriptor, decode: Callable[[bytes], object], data: bytes) -> object:
    if len(data) > LARGE_BYTES:
        check_fields(data, descriptor)
    return decode(data)


def check_fields(data: bytes, descriptor: Descriptor) -> None:
    """Raise ``InvalidArgument`` for a message with too many fields, or with groups, which have no length.

    Returns early for a message that cannot be decoded.
    """
    count = 0
    # A list and not recursion: the depth of nesting is the sender's choice.
    ranges = [(_nested(descriptor), 0, len(data))]  # bounded by the count
    try:
        while ranges:
            nested, at, end = ranges.pop()
            while at < end:
                count += 1
                if count > MAX_FIELDS:
                    raise InvalidArgument(f"the message has more than {MAX_FIELDS} fields; split the request")
                key, at = _varint(data, at)
                if key & 7 != _BYTES:
                    at = _after_number(data, at, key & 7)
                    continue
                size, at = _varint(data, at)
                if (child := nested.get(key >> 3)) is not None:
                    ranges.append((_nested(child), at, min(at + size, end)))
                at += size
    except IndexError:
        return


def _after_number(data: bytes, at: int, kind: int) -> int:
    """Return where a field that is no text and no message ends."""
    if kind == _VARINT:
        return _varint(data, at)[1]
    if kind in (_FIXED64, _FIXED32):
        return at + (8 if kind == _FIXED64 else 4)
    raise InvalidArgument("the message has a group, which no method takes")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number of at most ten bytes, and where it ends."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value, shift = byte & 0x7F, 7
    while byte >= 0x80 and shift < 70:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, at + 1


@cache  # once for each message type
def _nested(descriptor: Descriptor) -> dict[int, Descriptor]:
    """Return the types of the fields that are messages, by number."""
    return {field.number: field.message_type for field in descriptor.fields if field.message_type is not None}


_RECORDED = frozenset(
    f"/{method}"
    for method in (
        "tokenloom.v1.Inference/Generate",
        "tokenloom.v1.Inference/Resume",
        "tokenloom.v1.Inference/GenerateSession",
        "tokenloom.v1.Inference/Cancel",
        *(f"tokenloom.v1.Inference/{name}" for name in ("Embed", "Classify", "Score", "Pool", "Transcribe")),
        "inference.GRPCInferenceService/ModelInfer",
        "inference.GRPCInferenceService/ModelStreamInfer",
        "vllm.grpc.engine.VllmEngine/Generate",
    )
)
"""Other methods only read: their successful calls are counted but not recorded."""
_OK = 200


def observe_calls(counts: ResponseCounts, finished: FinishedRequests) -> ObserveCall:
    """Return the observer of a host's calls."""

    def observe(method: str) -> ObserveEnd:
        record, began = RequestRecord(), finished.clock()
        CURRENT_RECORD.set(record)

        def end(error: errors.TokenloomError | None) -> None:
            counts.count(method, "OK" if error is None else error.code.name, "" if error is None else error.reason)
            if error is not None or method in _RECORDED:
                finished.add(
                    record,
                    request_id=record.request_id or record.generation_id,
                    route=method,
                    key=call_key(),
                    began=began,
                    status=_OK if error is None else error.http_status,
                    reason="" if error is None else error.reason,
                )

        return end

    return observe

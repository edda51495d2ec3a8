"""Binds the count of a large gRPC message's fields to the methods of a servicer; and counts and records calls, answered
or refused."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from tokenloom.request import errors
from tokenloom.services.runtime.host.limits import decoded
from tokenloom.services.runtime.host.servicer_edge import ObserveCall, ObserveEnd

from ..http.response_counts import ResponseCounts
from ..request_log.access_log import FinishedRequests
from ..request_log.finished_request import CURRENT_RECORD, RequestRecord
from ..tenants.api_keys import call_key

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
            replaced[name] = handler._replace(request_deserializer=partial(decoded, request))
        self._server.add_registered_method_handlers(service, replaced)

    def add_generic_rpc_handlers(self, _: object) -> None:
        """Do nothing: generated code passes the same handlers by name too."""


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

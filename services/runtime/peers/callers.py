"""Checks, by the name in the caller's certificate, which service may call which (``docs/reference/callers.md``)."""

from collections.abc import Mapping
from typing import Any

import grpc.aio

from tokenloom.request.errors import PermissionDenied, Unauthenticated

from .certificate_files import service_of

OPERATOR = "operator"
"""The name in certificates for the operator's tools, which are no service."""
PLANNER = "planner"
"""The name in certificates for ``tokenloom plan``, which follows the coordinator, changes roles and may do no more."""

_V1 = "/tokenloom.v1."

# Allowed callers by prefix of a method's full name; the longest matching prefix counts.
CALLERS: Mapping[str, frozenset[str]] = {
    f"{_V1}Tokenizer/": frozenset({"gateway", OPERATOR}),
    f"{_V1}Encoder/": frozenset({"gateway"}),
    f"{_V1}Encoder/Get": frozenset({"engine"}),
    f"{_V1}Encoder/ResetCaches": frozenset({OPERATOR}),
    f"{_V1}Encoder/GetEncoderInfo": frozenset({"gateway", "engine", OPERATOR}),
    f"{_V1}OutputProcessor/": frozenset({"gateway"}),
    f"{_V1}Engine/": frozenset({"output_processor"}),
    f"{_V1}EngineAdmin/": frozenset({OPERATOR}),
    f"{_V1}EngineAdmin/WatchKVEvents": frozenset({"coordinator", OPERATOR}),
    f"{_V1}EngineAdmin/SetRole": frozenset({OPERATOR, PLANNER}),
    f"{_V1}KVTransfer/": frozenset({"engine"}),
    f"{_V1}Coordinator/Join": frozenset({"encoder", "engine"}),
    f"{_V1}Coordinator/Pick": frozenset({"output_processor"}),
    f"{_V1}Coordinator/Watch": frozenset({"coordinator", "gateway", "output_processor", "engine", OPERATOR, PLANNER}),
    f"{_V1}Coordinator/SetAdapter": frozenset({OPERATOR}),
    f"{_V1}Coordinator/SetDesiredState": frozenset({OPERATOR}),
    f"{_V1}Coordinator/Scale": frozenset({OPERATOR}),
    f"{_V1}Coordinator/Enroll": frozenset({"gateway", "output_processor"}),
    "/grpc.reflection.": frozenset({OPERATOR}),
}


def check_caller(method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    """Raise ``Unauthenticated`` or ``PermissionDenied`` unless the peer's certificate may call the method.

    ``method``: ``/package.Service/Method``; one that is not in the table may not be called at all.
    """
    # Only DNS names: an authority may sign other kinds of names, such as URIs, under laxer rules.
    names = context.auth_context().get("peer_dns", ())
    caller = service_of(name.decode() for name in names)
    if caller is None:
        raise Unauthenticated("the client certificate names no service of a mesh")
    # A method without an entry is allowed to no one, so a new rpc stays closed until it is added here.
    longest = max((prefix for prefix in CALLERS if method.startswith(prefix)), key=len, default="")
    allowed = CALLERS.get(longest, frozenset())
    if caller not in allowed:
        raise PermissionDenied(f"{caller} may not call {method.rpartition('/')[0].rpartition('.')[2]}")

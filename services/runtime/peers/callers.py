"""Who may call whom: the arrows of ``docs/architecture.md``, checked by the name in the caller's certificate."""

from collections.abc import Mapping
from typing import Any

import grpc.aio

from tokenloom.request.errors import PermissionDenied, Unauthenticated

from .tls import service_of

OPERATOR = "operator"
"""Whoever runs the mesh: a certificate for tools, of no service."""

_V1 = "/tokenloom.v1."

# By the beginning of a method's full name; the longest that fits counts.
CALLERS: Mapping[str, frozenset[str]] = {
    f"{_V1}Tokenizer/": frozenset({"gateway", OPERATOR}),
    f"{_V1}OutputProcessor/": frozenset({"gateway"}),
    f"{_V1}Engine/": frozenset({"output_processor"}),
    f"{_V1}EngineAdmin/": frozenset({OPERATOR}),
    f"{_V1}KVTransfer/": frozenset({"engine"}),
    f"{_V1}Coordinator/Join": frozenset({"engine"}),
    f"{_V1}Coordinator/Pick": frozenset({"output_processor"}),
    f"{_V1}Coordinator/Watch": frozenset({"gateway", "output_processor", "engine", OPERATOR}),
    "/grpc.reflection.": frozenset({OPERATOR}),
}


def check_caller(method: str, context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    """Raises ``Unauthenticated`` or ``PermissionDenied`` unless the peer's certificate may call the method.

    Args:
        method: ``/package.Service/Method``. One that is not in the table is nobody's.
    """
    names = context.auth_context().get("x509_subject_alternative_name", ())
    caller = service_of(name.decode() for name in names)
    if caller is None:
        raise Unauthenticated("the certificate is of no part of a mesh")
    allowed = max(((prefix, who) for prefix, who in CALLERS.items() if method.startswith(prefix)), default=("", ()))[1]
    if caller not in allowed:
        raise PermissionDenied(f"{caller} may not call {method.rpartition('/')[0].rpartition('.')[2]}")

"""Finds the tenant of a gRPC call."""

from contextvars import ContextVar

import grpc

from tokenloom.services.runtime.host.servicer_edge import Authorize

from .api_keys import ApiKeys
from .tenant import Tenant

_TENANT: ContextVar[Tenant] = ContextVar("tenant")


def admit_calls(keys: ApiKeys) -> Authorize:
    """Return the function that checks a call's key before its messages are read, and keeps the tenant for the handler.

    gRPC runs each call in a task of its own, from the check to the end of the handler, so the variable belongs to one
    call.
    """

    def admit(details: grpc.HandlerCallDetails) -> None:
        _TENANT.set(keys.authorize_metadata(details))

    return admit


def call_key() -> str:
    """Return the start of the digest of the key of the call that runs this code; empty if no key was accepted."""
    tenant = _TENANT.get(None)
    return "" if tenant is None else tenant.key


# The key is checked in a hook of gRPC that has no access to the handler. Each call has a task of its own, so a context
# variable passes the tenant on, and reading it outside of an admitted call fails.
def call_tenant() -> Tenant:
    """Return the tenant of the call that runs this code. Raises ``LookupError`` outside an admitted call."""
    return _TENANT.get()

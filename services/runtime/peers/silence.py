"""Says why a connection to a peer was lost: a process that ends resets it, a frozen or unreachable one is silent."""

import grpc.aio

from tokenloom.request.errors import Unavailable
from tokenloom.services.runtime.local_streams.call import SILENT

_KEEPALIVE = "keepalive"
"""Is in the details that gRPC gives when a peer did not answer its pings."""


class PeerSilent(Unavailable):
    """A stream is given up because its peer owes it a sign of life for too long. It stays on this side of the stream:
    callers get another error."""


def was_silent(error: BaseException) -> bool:
    """Return whether a stream ended because its peer sent nothing for too long, though nothing closed the connection:
    the stream counted it, or the transport below."""
    if isinstance(error, PeerSilent):
        return True
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() is not grpc.StatusCode.UNAVAILABLE:
        return False
    details = error.details() or ""
    return details == SILENT or _KEEPALIVE in details


def describe(error: BaseException) -> str:
    """Return why a stream ended, for the log."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__

"""Why KV elsewhere cannot be used, as it crosses gRPC: the reason in ErrorInfo is the failure's name."""

import grpc
import grpc.aio

from tokenloom.engine_core.kv_transfer.kv_messages import KV_FAILURES
from tokenloom.engine_core.kv_transfer.kv_transport import KVTransferError
from tokenloom.request import errors

_NOT_FOUND = ("not_found", "lease_expired", "lease_revoked")
_OF_CODE = {
    grpc.StatusCode.UNAVAILABLE: "owner_lost",
    grpc.StatusCode.CANCELLED: "owner_lost",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.NOT_FOUND: "not_found",
}


def to_error(reason: str, detail: str) -> errors.TokenloomError:
    """What the owner raises to its caller; ``reason`` is one of ``KV_FAILURES``."""
    kind = errors.NotFound if reason in _NOT_FOUND else errors.FailedPrecondition
    error = kind(detail or reason.replace("_", " "))
    error.reason = reason.upper()
    return error


def of_rpc(cause: grpc.aio.AioRpcError) -> KVTransferError:
    """What a failed call means to the reader. An owner that answers with nonsense is as good as lost."""
    error = errors.from_rpc(cause)
    reason = error.reason.lower()
    if reason not in KV_FAILURES:
        reason = _OF_CODE.get(error.code, "owner_lost")
    return KVTransferError(reason, error.message)


def known(reason: str) -> str:
    """A reason that another process gave, fit for a label."""
    return reason if reason in KV_FAILURES else "not_found"

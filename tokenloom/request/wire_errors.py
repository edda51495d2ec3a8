"""Sends and receives errors: inside the mesh as ``types_pb2.Error`` (in a shared stream) or as a gRPC status with
google.rpc details, and to HTTP clients as OpenAI's JSON."""

import contextlib
import logging
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from tokenloom.v1 import types_pb2

from .errors import ContextLengthExceeded, Internal, RateLimitExceeded, TokenloomError, Unimplemented, tree

log = logging.getLogger(__name__)

DOMAIN = "tokenloom"
"""``ErrorInfo.domain`` of our own errors. Other statuses come from the transport; clients do not see their text."""

_STATUS_DETAILS = "grpc-status-details-bin"
_MAX_RETRY_SECONDS = 86_400.0
"""Limit of a peer's time until a retry, which becomes a header of HTTP and a number of nanoseconds."""

_BY_REASON = {cls.reason: cls for cls in tree(TokenloomError)}
# Parents come before their children in the tree; reversed, the parent is kept for a code that they share.
_BY_CODE: dict[int, type[TokenloomError]] = {cls.code: cls for cls in reversed(list(tree(TokenloomError)))}
_STATUS_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# Messages for calls that the transport ended, not one of our services.
_TRANSPORT_MESSAGES = {
    grpc.StatusCode.UNAVAILABLE: "A service is unavailable; retry.",
    grpc.StatusCode.DEADLINE_EXCEEDED: "The deadline of the request has passed.",
    grpc.StatusCode.CANCELLED: "The request was cancelled.",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "A message exceeds the size limit.",
    grpc.StatusCode.UNIMPLEMENTED: "The service does not implement this call.",
}
_CUT_WITHOUT_STATUS = "Internal error from Core"
"""gRPC's text where the connection ended while the call was being opened or read, so that no status came."""


def of_exception(error: BaseException) -> TokenloomError:
    """Return the error that a caller may see: our own errors as they are, failed calls translated, all others logged
    and replaced by ``Internal``."""
    if isinstance(error, TokenloomError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc(error)
    if isinstance(error, NotImplementedError):  # what generated servicers raise
        return Unimplemented("This version does not implement the call.")
    log.error("unexpected error", exc_info=error)
    return Internal()


def status_of(error: TokenloomError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return _STATUS_BY_NUMBER[error.code]


def to_proto(error: BaseException) -> types_pb2.Error:
    """Return the error in the form that travels in a shared stream."""
    error = of_exception(error)
    proto = types_pb2.Error(code=error.code, message=error.message, reason=error.reason, field=error.field or "")
    if error.retry_after is not None and not error.is_final:
        proto.retry_after.CopyFrom(_duration(error.retry_after))
    return proto


def from_proto(proto: types_pb2.Error) -> TokenloomError:
    """Invert :func:`to_proto`; an unknown code or reason becomes the nearest known class and keeps its reason."""
    retry_after = _seconds(proto.retry_after) if proto.HasField("retry_after") else None
    return _make(proto.code, proto.reason, proto.message, proto.field or None, retry_after)


def to_status(error: BaseException) -> status_pb2.Status:
    """Return a google.rpc.Status with ErrorInfo, and with BadRequest, RetryInfo or QuotaFailure if they apply."""
    error = of_exception(error)
    status = status_pb2.Status(code=error.code, message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None and not error.is_final:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after)))
    if isinstance(error, RateLimitExceeded):
        quota = error_details_pb2.QuotaFailure.Violation(subject=error.limit, description=error.message)
        status.details.add().Pack(error_details_pb2.QuotaFailure(violations=[quota]))
    return status


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: BaseException) -> NoReturn:
    """End the call with the error's status and details. Never returns."""
    error = of_exception(error)
    details = ((_STATUS_DETAILS, to_status(error).SerializeToString()),)
    await context.abort(status_of(error), error.message, trailing_metadata=details)
    raise AssertionError("context.abort returned")


def from_rpc(error: grpc.aio.AioRpcError | grpc.Call) -> TokenloomError:
    """Return the error of a failed call. A status that is not ours keeps its code but not its text."""
    status = _attached_status(error)
    reason, field, retry_after, limit, ours = "", None, None, "", False
    for detail in status.details if status is not None else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        quota = error_details_pb2.QuotaFailure()
        if _unpacks(detail, info):
            ours, reason = info.domain == DOMAIN, info.reason
        elif _unpacks(detail, bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif _unpacks(detail, retry):
            retry_after = _seconds(retry.retry_delay)
        elif _unpacks(detail, quota) and quota.violations:
            limit = quota.violations[0].subject
    # The text of another sender may hold addresses and paths of the mesh, which clients must not see; so only its code
    # is kept.
    if ours and status is not None:
        ours_again = _make(error.code().value[0], reason, status.message, field, retry_after)
        if isinstance(ours_again, RateLimitExceeded):
            ours_again.limit = limit
        return ours_again
    log.debug("call failed: %s %s", error.code(), error.details())
    code = code_of(error)
    default_retry = 1.0 if code is grpc.StatusCode.UNAVAILABLE else None
    return _make(code.value[0], "", _TRANSPORT_MESSAGES.get(code, "internal error"), None, default_retry)


def was_cut(error: grpc.aio.AioRpcError | grpc.Call) -> bool:
    """Return whether a call ended with its connection: neither side of it has ended it with an error of ours."""
    is_of_transport = code_of(error) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return is_of_transport and _attached_status(error) is None


def code_of(error: grpc.aio.AioRpcError | grpc.Call) -> grpc.StatusCode:
    """Return the code of a failed call; ``UNAVAILABLE`` where gRPC says INTERNAL of a connection that ended."""
    code = error.code()
    is_cut = code is grpc.StatusCode.INTERNAL and error.details() == _CUT_WITHOUT_STATUS
    return grpc.StatusCode.UNAVAILABLE if is_cut else code


def openai_body(error: BaseException) -> dict[str, dict[str, str | None]]:
    """Return the JSON body of an HTTP error in OpenAI's form."""
    error = of_exception(error)
    code = error.reason.lower()
    message = error.message
    if isinstance(error, ContextLengthExceeded) and code not in message:
        # langchain-openai looks for the code in the text of the SDK's error, which is the message alone.
        message = f"{message} ({code})"
    body = {"message": message, "type": error.openai_type, "param": error.field, "code": code}
    if isinstance(error, RateLimitExceeded):
        body["limit"] = error.limit
    return {"error": body}


def _make(code: int, reason: str, message: str, field: str | None, retry_after: float | None) -> TokenloomError:
    cls = _BY_REASON.get(reason)
    if cls is None or (code in _STATUS_BY_NUMBER and cls.code != code):
        cls = _BY_CODE.get(code, Internal)
    error = cls(message, field=field)
    error.reason = reason or cls.reason
    error.retry_after = retry_after
    return error


def _attached_status(error: grpc.aio.AioRpcError | grpc.Call) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            with contextlib.suppress(DecodeError):  # it comes from another process, and this runs in handlers of errors
                return status_pb2.Status.FromString(value)
    return None


def _unpacks(detail: any_pb2.Any, into: Message) -> bool:
    """Return whether a detail of a status is of this type, and read it. One that is broken is of no type."""
    with contextlib.suppress(DecodeError):
        return detail.Unpack(into)
    return False


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return duration


def _seconds(duration: duration_pb2.Duration) -> float:
    # A peer may name a wait of centuries, which does not fit into the message that passes it on.
    return min(max(duration.ToNanoseconds() / 1e9, 0.0), _MAX_RETRY_SECONDS)

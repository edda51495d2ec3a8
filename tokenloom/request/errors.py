"""Defines the errors that callers may see, with their gRPC and HTTP statuses.

    TokenloomError
    ├── InvalidArgument        400  the caller's fault; ``field`` names what is wrong
    │   └── PayloadTooLarge    413
    ├── Unauthenticated        401
    ├── PermissionDenied       403
    ├── NotFound               404
    │   └── ModelNotFound      404
    ├── FailedPrecondition     400  (409 would invite a blind retry)
    ├── Aborted                409  replaced by something newer
    ├── Unimplemented          400
    ├── Cancelled              499
    ├── ResourceExhausted      503  full; ``retry_after`` says when to retry
    ├── Unavailable            503  down or shutting down; ``retry_after`` says when to retry
    ├── DeadlineExceeded       504
    └── Internal               500  a bug; only the log has its cause

Messages reach clients, so they hold no path, address or traceback. Inside the mesh an error travels as
``types_pb2.Error`` (in a shared stream) or as a gRPC status with google.rpc details.
"""

import logging
from collections.abc import Iterator
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2, status_pb2

from tokenloom.v1 import types_pb2

log = logging.getLogger(__name__)

DOMAIN = "tokenloom"
"""``ErrorInfo.domain`` of our own errors. Other statuses come from the transport; clients do not see their text."""

_STATUS_DETAILS = "grpc-status-details-bin"


class TokenloomError(Exception):
    """The base class of all errors that a caller may see.

    Args:
        message: Says what was wrong, where, and what would be right.
        field: The offending field of the request, in the public API's spelling.
        retry_after: Seconds after which a retry may succeed.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500
    openai_type: str = "server_error"
    reason: str = "INTERNAL"

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


class InvalidArgument(TokenloomError):
    """The request is wrong; a retry will not help."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "INVALID_ARGUMENT"

    def __init__(self, message: str, field: str | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class PayloadTooLarge(InvalidArgument):
    """The body is over the size limit."""

    http_status = 413
    reason = "PAYLOAD_TOO_LARGE"


class Unauthenticated(TokenloomError):
    """The credentials are missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "authentication_error"
    reason = "UNAUTHENTICATED"


class PermissionDenied(TokenloomError):
    """The caller is known but not allowed to do this."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "permission_error"
    reason = "PERMISSION_DENIED"


class NotFound(TokenloomError):
    """The requested object does not exist."""

    code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_type = "not_found_error"
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    """No model of this name is served."""

    openai_type = "invalid_request_error"
    reason = "MODEL_NOT_FOUND"


class FailedPrecondition(TokenloomError):
    """The call is not possible in the current state; a mere retry does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "FAILED_PRECONDITION"


class Aborted(TokenloomError):
    """A newer caller of the same name has replaced this one."""

    code = grpc.StatusCode.ABORTED
    http_status = 409
    reason = "ABORTED"


class Unimplemented(TokenloomError):
    """This version does not implement this part of the contract."""

    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "UNIMPLEMENTED"


class Cancelled(TokenloomError):
    """The caller disconnected or cancelled the request."""

    code = grpc.StatusCode.CANCELLED
    http_status = 499
    reason = "CANCELLED"


class ResourceExhausted(TokenloomError):
    """Every engine or queue that could take the request is full, or a limit is reached."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 503
    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = 1.0) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class Unavailable(TokenloomError):
    """A service is down, shutting down or not ready yet; a retry may find another one."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = 1.0) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class DeadlineExceeded(TokenloomError):
    """The deadline of the request has passed."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    openai_type = "timeout_error"
    reason = "DEADLINE_EXCEEDED"


class Internal(TokenloomError):
    """A bug in the server; the caller sees no details."""

    def __init__(self, message: str = "internal error", *, field: str | None = None) -> None:
        super().__init__(message, field=field)


def _tree(cls: type[TokenloomError]) -> Iterator[type[TokenloomError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _tree(child)


_BY_REASON = {cls.reason: cls for cls in _tree(TokenloomError)}
# Parents come before their children in the tree; reversed, the parent is kept for a code that they share.
_BY_CODE = {cls.code: cls for cls in reversed(list(_tree(TokenloomError)))}
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# Messages for calls that the transport ended, not one of our services.
_TRANSPORT_MESSAGES = {
    grpc.StatusCode.UNAVAILABLE: "A service is unavailable; retry.",
    grpc.StatusCode.DEADLINE_EXCEEDED: "The deadline of the request has passed.",
    grpc.StatusCode.CANCELLED: "The request was cancelled.",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "A message exceeds the size limit.",
    grpc.StatusCode.UNIMPLEMENTED: "The service does not implement this call.",
}


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


def to_proto(error: BaseException) -> types_pb2.Error:
    """Return the error in the form that travels in a shared stream."""
    error = of_exception(error)
    proto = types_pb2.Error(
        code=error.code.value[0], message=error.message, reason=error.reason, field=error.field or ""
    )
    if error.retry_after is not None:
        proto.retry_after.CopyFrom(_duration(error.retry_after))
    return proto


def from_proto(proto: types_pb2.Error) -> TokenloomError:
    """Invert :func:`to_proto`; an unknown code or reason becomes the nearest known class and keeps its reason."""
    retry_after = _seconds(proto.retry_after) if proto.HasField("retry_after") else None
    return _make(_CODE_BY_NUMBER.get(proto.code), proto.reason, proto.message, proto.field or None, retry_after)


def to_status(error: BaseException) -> status_pb2.Status:
    """Return a google.rpc.Status with ErrorInfo, and with BadRequest or RetryInfo if they apply."""
    error = of_exception(error)
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after)))
    return status


async def abort(context: "grpc.aio.ServicerContext[Any, Any]", error: BaseException) -> NoReturn:
    """End the call with the error's status and details. Never returns."""
    error = of_exception(error)
    details = ((_STATUS_DETAILS, to_status(error).SerializeToString()),)
    await context.abort(error.code, error.message, trailing_metadata=details)
    raise AssertionError("context.abort returned")


def from_rpc(error: grpc.aio.AioRpcError | grpc.Call) -> TokenloomError:
    """Return the error of a failed call, awaited or blocking. A status that is not ours keeps its code but not its
    text."""
    status = _attached_status(error)
    reason, field, retry_after, ours = "", None, None, False
    for detail in status.details if status is not None else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            ours, reason = info.domain == DOMAIN, info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after = _seconds(retry.retry_delay)
    if ours and status is not None:
        return _make(error.code(), reason, status.message, field, retry_after)
    log.debug("call failed: %s %s", error.code(), error.details())
    default_retry = 1.0 if error.code() is grpc.StatusCode.UNAVAILABLE else None
    return _make(error.code(), "", _TRANSPORT_MESSAGES.get(error.code(), "internal error"), None, default_retry)


def openai_body(error: BaseException) -> dict[str, dict[str, str | None]]:
    """Return the JSON body of an HTTP error in OpenAI's form."""
    error = of_exception(error)
    code = error.reason.lower()
    return {"error": {"message": error.message, "type": error.openai_type, "param": error.field, "code": code}}


def _make(
    code: grpc.StatusCode | None, reason: str, message: str, field: str | None, retry_after: float | None
) -> TokenloomError:
    cls = _BY_REASON.get(reason)
    if cls is None or (code is not None and cls.code is not code):
        cls = _BY_CODE.get(code, Internal) if code is not None else Internal
    error = cls(message, field=field)
    error.reason = reason or cls.reason
    error.retry_after = retry_after
    return error


def _attached_status(error: grpc.aio.AioRpcError | grpc.Call) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS and isinstance(value, bytes):
            return status_pb2.Status.FromString(value)
    return None


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(round(max(seconds, 0.0) * 1e9))
    return duration


def _seconds(duration: duration_pb2.Duration) -> float:
    return duration.ToNanoseconds() / 1e9

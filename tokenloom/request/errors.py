"""One error tree, and one table to gRPC and HTTP.

    TokenloomError
    ├── InvalidArgument        400  INVALID_ARGUMENT     the caller's; ``field`` names what is wrong
    │   └── PayloadTooLarge    413
    ├── Unauthenticated        401
    ├── PermissionDenied       403
    ├── NotFound               404
    │   └── ModelNotFound      404
    ├── FailedPrecondition     400  (409 would invite a blind retry)
    ├── Aborted                409  overtaken by something newer
    ├── Unimplemented          400
    ├── Cancelled              499
    ├── ResourceExhausted      503  full; ``retry_after`` says when to come again
    ├── Unavailable            503  gone or going; ``retry_after`` likewise
    ├── DeadlineExceeded       504
    └── Internal               500  our own bug; its cause is in the log only

Messages reach clients: no path, address or traceback. Inside the mesh an error travels as ``types_pb2.Error`` (in a
shared stream) or as a gRPC status with google.rpc details.
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
"""``ErrorInfo.domain`` of our own errors: other statuses are the transport's, whose text is not for clients."""

_STATUS_DETAILS = "grpc-status-details-bin"


class TokenloomError(Exception):
    """Base of all errors that a caller may see.

    Args:
        message: What was wrong, where, and what would be right.
        field: The offending field of the request, in the public API's spelling.
        retry_after: Seconds after which trying again may help.
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
    """The request is wrong, and will be wrong again."""

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
    """No credentials, or wrong ones."""

    code = grpc.StatusCode.UNAUTHENTICATED
    http_status = 401
    openai_type = "authentication_error"
    reason = "UNAUTHENTICATED"


class PermissionDenied(TokenloomError):
    """Known, but not allowed."""

    code = grpc.StatusCode.PERMISSION_DENIED
    http_status = 403
    openai_type = "permission_error"
    reason = "PERMISSION_DENIED"


class NotFound(TokenloomError):
    """No such thing."""

    code = grpc.StatusCode.NOT_FOUND
    http_status = 404
    openai_type = "not_found_error"
    reason = "NOT_FOUND"


class ModelNotFound(NotFound):
    """No model of that name is served."""

    openai_type = "invalid_request_error"
    reason = "MODEL_NOT_FOUND"


class FailedPrecondition(TokenloomError):
    """Not in this state; trying again alone does not help."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "FAILED_PRECONDITION"


class Aborted(TokenloomError):
    """Overtaken: a newer one of the same name took its place."""

    code = grpc.StatusCode.ABORTED
    http_status = 409
    reason = "ABORTED"


class Unimplemented(TokenloomError):
    """A part of the contract that this version does not fulfil."""

    code = grpc.StatusCode.UNIMPLEMENTED
    http_status = 400
    openai_type = "invalid_request_error"
    reason = "UNIMPLEMENTED"


class Cancelled(TokenloomError):
    """The caller went away or asked for it."""

    code = grpc.StatusCode.CANCELLED
    http_status = 499
    reason = "CANCELLED"


class ResourceExhausted(TokenloomError):
    """Full: every engine, queue or limit that could take the request is taken."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    http_status = 503
    reason = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = 1.0) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class Unavailable(TokenloomError):
    """Gone, going or not there yet; another try may find a live one."""

    code = grpc.StatusCode.UNAVAILABLE
    http_status = 503
    reason = "UNAVAILABLE"

    def __init__(self, message: str, *, field: str | None = None, retry_after: float | None = 1.0) -> None:
        super().__init__(message, field=field, retry_after=retry_after)


class DeadlineExceeded(TokenloomError):
    """The request's time ran out."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    http_status = 504
    openai_type = "timeout_error"
    reason = "DEADLINE_EXCEEDED"


class Internal(TokenloomError):
    """A bug of ours; the caller learns nothing more than that."""

    def __init__(self, message: str = "internal error", *, field: str | None = None) -> None:
        super().__init__(message, field=field)


def _tree(cls: type[TokenloomError]) -> Iterator[type[TokenloomError]]:
    for child in cls.__subclasses__():
        yield child
        yield from _tree(child)


_BY_REASON = {cls.reason: cls for cls in _tree(TokenloomError)}
# A parent comes before its children in the tree, so that reversing leaves the parent under a code they share.
_BY_CODE = {cls.code: cls for cls in reversed(list(_tree(TokenloomError)))}
_CODE_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# What a client reads when the transport, not one of our services, ended a call.
_TRANSPORT_MESSAGES = {
    grpc.StatusCode.UNAVAILABLE: "a part of the service is unavailable; try again",
    grpc.StatusCode.DEADLINE_EXCEEDED: "the request's time ran out",
    grpc.StatusCode.CANCELLED: "the request was cancelled",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "a message was over the size limit",
    grpc.StatusCode.UNIMPLEMENTED: "this part of the service does not know the call",
}


def of_exception(error: BaseException) -> TokenloomError:
    """The error a caller may see: ours as it is, a failed call translated, all else logged and made ``Internal``."""
    if isinstance(error, TokenloomError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc(error)
    if isinstance(error, NotImplementedError):  # what generated servicers raise
        return Unimplemented("this version does not implement the call")
    log.error("unexpected error", exc_info=error)
    return Internal()


def to_proto(error: BaseException) -> types_pb2.Error:
    """The error as it travels in a shared stream."""
    error = of_exception(error)
    proto = types_pb2.Error(
        code=error.code.value[0], message=error.message, reason=error.reason, field=error.field or ""
    )
    if error.retry_after is not None:
        proto.retry_after.CopyFrom(_duration(error.retry_after))
    return proto


def from_proto(proto: types_pb2.Error) -> TokenloomError:
    """Inverse of :func:`to_proto`; an unknown code or reason becomes the nearest known class, the reason stays."""
    retry_after = _seconds(proto.retry_after) if proto.HasField("retry_after") else None
    return _make(_CODE_BY_NUMBER.get(proto.code), proto.reason, proto.message, proto.field or None, retry_after)


def to_status(error: BaseException) -> status_pb2.Status:
    """A google.rpc.Status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
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
    """Ends the call with the error's status and details. Never returns."""
    error = of_exception(error)
    details = ((_STATUS_DETAILS, to_status(error).SerializeToString()),)
    await context.abort(error.code, error.message, trailing_metadata=details)
    raise AssertionError("context.abort returned")


def from_rpc(error: grpc.aio.AioRpcError | grpc.Call) -> TokenloomError:
    """What a failed call, awaited or blocking, means to our caller. A status that is not our own keeps its code but not
    its text."""
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
    """The JSON body of an HTTP error, in OpenAI's form."""
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

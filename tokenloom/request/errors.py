"""Defines the errors that callers may see, with their gRPC and HTTP statuses.

    TokenloomError
    ├── InvalidArgument        400  the caller's fault; ``field`` names what is wrong
    │   ├── PayloadTooLarge    413
    │   └── BodyChanged        422  the request was begun with another body
    ├── Unauthenticated        401
    ├── PermissionDenied       403
    ├── NotFound               404
    │   ├── ModelNotFound      404
    │   └── RequestLost        404  the request cannot be resumed; it may be sent again
    ├── FailedPrecondition     400  (409 would invite a blind retry)
    ├── Aborted                409  replaced by something newer
    ├── Unimplemented          400
    ├── Cancelled              499
    ├── ResourceExhausted      503  full; ``retry_after`` says when to retry
    │   └── RateLimitExceeded  429  the tenant is at a limit of its own, named by ``limit``
    ├── Unavailable            503  down or shutting down; ``retry_after`` says when to retry
    │   ├── TryElsewhere       503  another part of the same kind may take the request, or the rest of it
    │   │   └── EngineDied     503  the engine died while it ran only this request
    │   └── GatewayLeaving     503  the gateway shuts down; the answer can be resumed through another one
    ├── DeadlineExceeded       504
    └── Internal               500  a bug; only the log has its cause
        ├── EngineKiller       500  two engines died while they ran only this request
        └── OutputProcessorKiller   500  three output processors ended while they ran only this request

Messages reach clients, so they hold no path, address or traceback. Inside the mesh an error travels as
``types_pb2.Error`` (in a shared stream) or as a gRPC status with google.rpc details.
"""

import logging
import re
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
    """The base class of all errors that a caller may see. Subclasses inherit what they do not state.

    Args:
        message: Says what was wrong, where, and what would be right.
        field: The offending field of the request, in the public API's spelling.
        retry_after: Seconds after which a retry may succeed.
    """

    code: grpc.StatusCode = grpc.StatusCode.INTERNAL
    http_status: int = 500
    openai_type: str = "server_error"
    reason: str = "INTERNAL"
    is_final: bool = False
    """Whether the caller must not send the same request again: it would fail again, or do harm again. Such an error
    never has RetryInfo, and over HTTP the header ``x-should-retry: false``, which OpenAI's clients obey."""

    def __init_subclass__(
        cls,
        *,
        code: grpc.StatusCode | None = None,
        http: int = 0,
        openai: str = "",
        is_final: bool | None = None,
    ) -> None:
        cls.is_final = cls.is_final if is_final is None else is_final
        cls.code, cls.http_status, cls.openai_type = (
            code or cls.code,
            http or cls.http_status,
            openai or cls.openai_type,
        )
        if "reason" not in cls.__dict__:
            cls.reason = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).upper()

    def __init__(self, message: str, field: str | None = None, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after = retry_after


_Code = grpc.StatusCode
_WRONG = "invalid_request_error"


class InvalidArgument(TokenloomError, code=_Code.INVALID_ARGUMENT, http=400, openai=_WRONG, is_final=True):
    """The request is wrong; a retry will not help."""


class PayloadTooLarge(InvalidArgument, http=413):
    """The body is over the size limit."""


class BodyChanged(InvalidArgument, http=422):
    """The request that the caller resumes or repeats was begun with another body."""


class Unauthenticated(
    TokenloomError, code=_Code.UNAUTHENTICATED, http=401, openai="authentication_error", is_final=True
):
    """The credentials are missing or wrong."""


class PermissionDenied(
    TokenloomError, code=_Code.PERMISSION_DENIED, http=403, openai="permission_error", is_final=True
):
    """The caller is known but not allowed to do this."""


class NotFound(TokenloomError, code=_Code.NOT_FOUND, http=404, openai="not_found_error", is_final=True):
    """The requested object does not exist."""


class ModelNotFound(NotFound, openai=_WRONG):
    """No model of this name is served."""


class RequestLost(NotFound):
    """The request that the caller resumes is not known, or not any more. The caller may send it again as a new one."""


class FailedPrecondition(TokenloomError, code=_Code.FAILED_PRECONDITION, http=400, openai=_WRONG, is_final=True):
    """The call is not possible in the current state; a mere retry does not help."""


class Aborted(TokenloomError, code=_Code.ABORTED, http=409):
    """A newer caller of the same name has replaced this one."""


class Unimplemented(TokenloomError, code=_Code.UNIMPLEMENTED, http=400, openai=_WRONG, is_final=True):
    """This version does not implement this part of the contract."""


class Cancelled(TokenloomError, code=_Code.CANCELLED, http=499, is_final=True):
    """The caller disconnected or cancelled the request."""


class ResourceExhausted(TokenloomError, code=_Code.RESOURCE_EXHAUSTED, http=503):
    """Every engine or queue that could take the request is full, or a limit is reached."""

    def __init__(self, message: str, field: str | None = None, *, retry_after: float | None = 1.0) -> None:
        super().__init__(message, field, retry_after=retry_after)


class RateLimitExceeded(ResourceExhausted, http=429, openai="rate_limit_error"):
    """A tenant is at one of its limits; other tenants are served.

    Its reason is also the ``code`` of OpenAI's own answer with status 429.

    Args:
        limit: The limit's name, as in the key file.
    """

    def __init__(
        self, message: str, field: str | None = None, *, limit: str = "", retry_after: float | None = 1.0
    ) -> None:
        super().__init__(message, field, retry_after=retry_after)
        self.limit = limit


class Unavailable(TokenloomError, code=_Code.UNAVAILABLE, http=503):
    """A service is down, shutting down or not ready yet; a retry may find another one."""

    def __init__(self, message: str, field: str | None = None, *, retry_after: float | None = 1.0) -> None:
        super().__init__(message, field, retry_after=retry_after)


class TryElsewhere(Unavailable):
    """The part that was asked cannot run the request, or the rest of it (it drains, is full, or its core died), but
    another part of the same kind may. The caller within the mesh places the request again; a client sees this error
    only when no other part is left."""


class EngineDied(TryElsewhere):
    """The core of the engine died while it ran only this request. Another engine may run the rest of it; after a second
    such death no engine gets it (:class:`EngineKiller`)."""


class GatewayLeaving(Unavailable):
    """The gateway that streams the answer shuts down; the caller can resume the answer through another one."""


class DeadlineExceeded(TokenloomError, code=_Code.DEADLINE_EXCEEDED, http=504, openai="timeout_error", is_final=True):
    """The deadline of the request has passed. A client that retried it would make an overload worse."""


class Internal(TokenloomError, code=_Code.INTERNAL):
    """A bug in the server; the caller sees no details."""

    def __init__(self, message: str = "internal error", *, field: str | None = None) -> None:
        super().__init__(message, field)


class EngineKiller(Internal, is_final=True):
    """Two engines died while they ran only this request, so it is not given to a third one."""


class OutputProcessorKiller(Internal, is_final=True):
    """Three output processors ended while they ran only this request, so it is not given to a fourth one."""


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
    if error.retry_after is not None and not error.is_final:
        proto.retry_after.CopyFrom(_duration(error.retry_after))
    return proto


def from_proto(proto: types_pb2.Error) -> TokenloomError:
    """Invert :func:`to_proto`; an unknown code or reason becomes the nearest known class and keeps its reason."""
    retry_after = _seconds(proto.retry_after) if proto.HasField("retry_after") else None
    return _make(_CODE_BY_NUMBER.get(proto.code), proto.reason, proto.message, proto.field or None, retry_after)


def to_status(error: BaseException) -> status_pb2.Status:
    """Return a google.rpc.Status with ErrorInfo, and with BadRequest, RetryInfo or QuotaFailure if they apply."""
    error = of_exception(error)
    status = status_pb2.Status(code=error.code.value[0], message=error.message)
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
    await context.abort(error.code, error.message, trailing_metadata=details)
    raise AssertionError("context.abort returned")


def from_rpc(error: grpc.aio.AioRpcError | grpc.Call) -> TokenloomError:
    """Return the error of a failed call. A status that is not ours keeps its code but not its text."""
    status = _attached_status(error)
    reason, field, retry_after, limit, ours = "", None, None, "", False
    for detail in status.details if status is not None else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        quota = error_details_pb2.QuotaFailure()
        if detail.Unpack(info):
            ours, reason = info.domain == DOMAIN, info.reason
        elif detail.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif detail.Unpack(retry):
            retry_after = _seconds(retry.retry_delay)
        elif detail.Unpack(quota) and quota.violations:
            limit = quota.violations[0].subject
    if ours and status is not None:
        ours_again = _make(error.code(), reason, status.message, field, retry_after)
        if isinstance(ours_again, RateLimitExceeded):
            ours_again.limit = limit
        return ours_again
    log.debug("call failed: %s %s", error.code(), error.details())
    default_retry = 1.0 if error.code() is grpc.StatusCode.UNAVAILABLE else None
    return _make(error.code(), "", _TRANSPORT_MESSAGES.get(error.code(), "internal error"), None, default_retry)


def was_cut(error: grpc.aio.AioRpcError | grpc.Call) -> bool:
    """Return whether a call ended with its connection: neither side of it has ended it with an error of ours."""
    is_of_transport = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    return is_of_transport and _attached_status(error) is None


def openai_body(error: BaseException) -> dict[str, dict[str, str | None]]:
    """Return the JSON body of an HTTP error in OpenAI's form."""
    error = of_exception(error)
    code = error.reason.lower()
    body = {"message": error.message, "type": error.openai_type, "param": error.field, "code": code}
    if isinstance(error, RateLimitExceeded):
        body["limit"] = error.limit
    return {"error": body}


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

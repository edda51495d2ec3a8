"""Defines the errors that callers may see, with their gRPC and HTTP statuses.

    TokenloomError
    ├── InvalidArgument        400  the caller's fault; ``field`` names what is wrong
    │   ├── PayloadTooLarge    413
    │   ├── ContextLengthExceeded  400  prompt and answer do not fit the model's context
    │   └── BodyChanged        422  the request was begun with another body
    ├── Unauthenticated        401
    ├── PermissionDenied       403
    ├── NotFound               404
    │   ├── ModelNotFound      404
    │   ├── MediaLost          503  the file of an image is gone; the gateway puts it again
    │   └── RequestLost        404  the request cannot be resumed; it may be sent again
    ├── FailedPrecondition     400  (409 would invite a blind retry)
    ├── Aborted                409  replaced by something newer
    ├── Unimplemented          400
    │   └── EngineLacks        400  engines of this kind do not do what the request needs; those of another kind may
    ├── Cancelled              499
    ├── ResourceExhausted      503  full; ``retry_after`` says when to retry
    │   └── RateLimitExceeded  429  the tenant is at a limit of its own, named by ``limit``
    ├── Unavailable            503  down or shutting down; ``retry_after`` says when to retry
    │   ├── TryElsewhere       503  another part of the same kind may take the request, or the rest of it
    │   │   ├── EngineDied     503  the engine died while it ran only this request
    │   │   └── WeightsReplaced  503  the engine has other weights now, with which the request may go on
    │   └── GatewayLeaving     503  the gateway shuts down; the answer can be resumed through another one
    ├── DeadlineExceeded       504
    └── Internal               500  a bug; only the log has its cause
        ├── EngineKiller       500  two engines died while they ran only this request
        └── OutputProcessorKiller   500  three output processors ended while they ran only this request

Messages reach clients, so they hold no path, address or traceback. :mod:`.wire_errors` sends and receives errors. This
module imports neither gRPC nor protobuf: the command line reads settings, which raise errors, without them.
"""

import re
from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Self


class Code(IntEnum):
    """The statuses of gRPC that errors have, by their names and numbers there."""

    # A copy of gRPC's numbers: the settings raise errors, and `serve --help` reads all settings. With gRPC and protobuf
    # behind them it took 0.57 to 0.65 s of CPU, without 0.37 to 0.43 s.
    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class TokenloomError(Exception):
    """The base class of all errors that a caller may see. Subclasses inherit what they do not state.

    Args:
        message: Says what was wrong, where, and what would be right.
        field: The offending field of the request, in the public API's spelling.
        retry_after: Seconds after which a retry may succeed.
    """

    code: Code = Code.INTERNAL
    http_status: int = 500
    openai_type: str = "server_error"
    reason: str = "INTERNAL"
    # OpenAI's SDKs repeat every status from 500 on, and 408, 409 and 429: a request that has killed two engines would
    # come again and kill two more. INTERNAL and ABORTED are not final: a fault may pass, and an earlier call may only
    # be late.
    is_final: bool = False
    """Whether the caller must not send the same request again: it would fail again, or do harm again. Such an error
    never has RetryInfo, and over HTTP the header ``x-should-retry: false``, which OpenAI's clients obey."""

    def __init_subclass__(
        cls,
        *,
        code: Code | None = None,
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


_WRONG = "invalid_request_error"


class InvalidArgument(TokenloomError, code=Code.INVALID_ARGUMENT, http=400, openai=_WRONG, is_final=True):
    """The request is wrong; a retry will not help."""

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Name fields as the client does, in the message too, and return the error.

        ``names``: what the client calls a field, by our name.
        """
        for ours, theirs in names.items():
            whole = re.compile(rf"(?<!\w){re.escape(ours)}(?!\w)")
            self.field = self.field and whole.sub(theirs, self.field)
            self.message = whole.sub(theirs, self.message)
        return self


class PayloadTooLarge(InvalidArgument, http=413):
    """The body is over the size limit."""


class ContextLengthExceeded(InvalidArgument):
    """The prompt, or the prompt and the answer that was asked for, are longer than the model's context.

    Its reason is also the ``code`` of OpenAI's own answer, and its messages have the words "maximum context length is N
    tokens": clients find out by these that they have to shorten the conversation.

    Args:
        num_tokens: At least so many tokens were asked for; 0: not known, for the error came from another part.
        max_tokens: How many the context has.
    """

    def __init__(self, message: str, field: str | None = None, *, num_tokens: int = 0, max_tokens: int = 0) -> None:
        super().__init__(message, field)
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens

    @classmethod
    def of(cls, num_tokens: int, max_tokens: int, reason: str, field: str) -> Self:
        """Return the error. ``reason``: says which tokens were too many, and what would be right."""
        message = f"This model's maximum context length is {max_tokens} tokens, but {reason}"
        return cls(message, field, num_tokens=num_tokens, max_tokens=max_tokens)


class BodyChanged(InvalidArgument, http=422):
    """The request that the caller resumes or repeats was begun with another body."""


class Unauthenticated(
    TokenloomError, code=Code.UNAUTHENTICATED, http=401, openai="authentication_error", is_final=True
):
    """The credentials are missing or wrong."""


class PermissionDenied(TokenloomError, code=Code.PERMISSION_DENIED, http=403, openai="permission_error", is_final=True):
    """The caller is known but not allowed to do this."""


class NotFound(TokenloomError, code=Code.NOT_FOUND, http=404, openai="not_found_error", is_final=True):
    """The requested object does not exist."""


class ModelNotFound(NotFound, openai=_WRONG):
    """No model of this name is served."""


class QueryLost(NotFound):
    """The engine does not hold the query's vectors, or not any more; the gateway sends the query again."""


class MediaLost(NotFound, http=503, openai="server_error", is_final=False):
    """The encoder does not hold the file of an image or a sound any more, or is gone. The gateway, which has the file,
    puts it again and sends the rest of the request."""


class RequestLost(NotFound):
    """The request that the caller resumes is not known, or not any more. The caller may send it again as a new one."""


class FailedPrecondition(TokenloomError, code=Code.FAILED_PRECONDITION, http=400, openai=_WRONG, is_final=True):
    """The call is not possible in the current state; a mere retry does not help."""


class Aborted(TokenloomError, code=Code.ABORTED, http=409):
    """A newer caller of the same name has replaced this one."""


class Unimplemented(TokenloomError, code=Code.UNIMPLEMENTED, http=400, openai=_WRONG, is_final=True):
    """This version does not implement this part of the contract."""


class EngineLacks(Unimplemented):
    """The engine computes by a server of others, which does not do what the request needs; an engine of ours may. A
    client sees this error only when there is none."""


class Cancelled(TokenloomError, code=Code.CANCELLED, http=499, is_final=True):
    """The caller disconnected or cancelled the request."""


class ResourceExhausted(TokenloomError, code=Code.RESOURCE_EXHAUSTED, http=503):
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


class Unavailable(TokenloomError, code=Code.UNAVAILABLE, http=503):
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


class WeightsReplaced(TryElsewhere):
    """An operator has replaced weights. From an engine: its requests are to go on with others, so any engine may run
    the rest with those that it has. From the coordinator: no engine has those with which the answer began."""


class GatewayLeaving(Unavailable):
    """The gateway that streams the answer shuts down; the caller can resume the answer through another one."""


class DeadlineExceeded(TokenloomError, code=Code.DEADLINE_EXCEEDED, http=504, openai="timeout_error", is_final=True):
    """The deadline of the request has passed. A client that retried it would make an overload worse."""


class Internal(TokenloomError, code=Code.INTERNAL):
    """A bug in the server; the caller sees no details."""

    def __init__(self, message: str = "internal error", *, field: str | None = None) -> None:
        super().__init__(message, field)


class EngineKiller(Internal, is_final=True):
    """Two engines died while they ran only this request, so it is not given to a third one."""


class OutputProcessorKiller(Internal, is_final=True):
    """Three output processors ended while they ran only this request, so it is not given to a fourth one."""


def tree(cls: type[TokenloomError]) -> Iterator[type[TokenloomError]]:
    """Yield the subclasses of a class of errors, parents before their children."""
    for child in cls.__subclasses__():
        yield child
        yield from tree(child)

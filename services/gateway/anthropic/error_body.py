"""Reports errors in Anthropic's form."""

from collections.abc import Mapping

from tokenloom.request import errors

from ..http.http_exchange import ErrorForm

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: errors.TokenloomError) -> dict[str, object]:
    """Return the JSON body of an error. The field that is wrong stands before the message."""
    message = error.message
    if isinstance(error, errors.ContextLengthExceeded):
        # Anthropic's clients shorten a conversation where they read these words. Another part's error has no numbers.
        counts = f": {error.num_tokens} tokens > {error.max_tokens} maximum" if error.num_tokens else ""
        message = f"prompt is too long{counts}. {message}"
    elif error.field is not None and error.field not in message:
        message = f"{error.field}: {message}"
    return {"type": "error", "error": {"type": _TYPES.get(error.http_status, "api_error"), "message": message}}


ANTHROPIC = ErrorForm(error_body, event_name=b"error", id_header=b"request-id")

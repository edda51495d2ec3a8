"""Says how an API reports errors, and names requests."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenloom.request import errors, wire_errors

from ..encoding.sse import encode_json


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """Describes errors as one API's clients expect them."""

    describe: Callable[[errors.TokenloomError], object]
    """Returns the JSON body of a response."""
    event_name: bytes = b""
    """Name of the event that reports an error in a stream that has begun; empty: it has none."""
    describe_event: Callable[[errors.TokenloomError], object] | None = None
    """Returns the JSON of that event, where it is not that of a response."""
    id_header: bytes = b""
    """Name of the header in which the API's clients look for the request's id, besides ``x-request-id``."""
    is_lines: bool = False
    """Whether a stream consists of lines of JSON instead of events."""

    def body(self, error: errors.TokenloomError) -> bytes:
        return encode_json(self.describe(error))

    def event(self, error: errors.TokenloomError) -> bytes:
        """Return the last event of a stream."""
        if self.is_lines:
            return self.body(error) + b"\n"
        name = b"event: %b\n" % self.event_name if self.event_name else b""
        describe = self.describe_event or self.describe
        return b"%bdata: %b\n\n" % (name, encode_json(describe(error)))


def _response_event(error: errors.TokenloomError) -> dict[str, object]:
    """Return the event of the Responses API. OpenAI's client raises for the member ``error``, and would otherwise yield
    the event as one of many."""
    body = wire_errors.openai_body(error)
    return {"type": "error", **{name: body["error"].get(name) for name in ("code", "message", "param")}, **body}


OPENAI = ErrorForm(wire_errors.openai_body)
RESPONSES = ErrorForm(wire_errors.openai_body, b"error", _response_event)

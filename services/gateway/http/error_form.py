"""Says how an API reports errors."""

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
    is_lines: bool = False
    """Whether a stream consists of lines of JSON instead of events."""

    def body(self, error: errors.TokenloomError) -> bytes:
        return encode_json(self.describe(error))

    def event(self, error: errors.TokenloomError) -> bytes:
        """Return the last event of a stream."""
        if self.is_lines:
            return self.body(error) + b"\n"
        name = b"event: %b\n" % self.event_name if self.event_name else b""
        return b"%bdata: %b\n\n" % (name, self.body(error))


OPENAI = ErrorForm(wire_errors.openai_body)

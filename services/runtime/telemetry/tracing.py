"""Traces of requests across services, as W3C headers carry them. What exports them, :mod:`otlp`, is imported on demand.

A part without a tracer makes no span and passes no headers on; nor does any part for a request that is not sampled.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Literal, Protocol

NAMES = ("traceparent", "tracestate")
"""Headers that travel; https://www.w3.org/TR/trace-context/ names them."""
MAX_HEADER_CHARS = 512
"""Of either: a vendor's list of states has no need of more."""

Headers = Mapping[str, str]
CURRENT: ContextVar[Headers] = ContextVar("trace_headers", default=MappingProxyType({}))
"""Of the request that a task works on, for the calls that it makes; empty when nobody traces it."""
NO_HEADERS: Headers = MappingProxyType({})
Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]


class Span(Protocol):
    """A span that has begun. Times are monotonic nanoseconds, of this process's clock.

    Attributes:
        headers: For whoever makes spans under this one.
    """

    @property
    def headers(self) -> Headers: ...

    def child(self, name: str, started_ns: int, ended_ns: int, attributes: Attributes | None = None) -> None:
        """Adds a span that is already over."""

    def end(self, attributes: Attributes | None = None, error: str = "", ended_ns: int | None = None) -> None:
        """Ends it, now unless told otherwise. ``error``: what went wrong; empty: nothing did."""


class Tracer(Protocol):
    """Makes spans and sends them away, off the event loop; losing some rather than holding up anybody."""

    def start(
        self,
        name: str,
        headers: Headers,
        *,
        kind: Literal["server", "internal"] = "internal",
        started_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span | None:
        """Begins a span under the one that ``headers`` name, or a trace of its own; None when it is not sampled."""

    def close(self) -> None:
        """Sends what is left, within two seconds. Blocks."""


def pick_headers(pairs: Iterable[tuple[str, str | bytes]]) -> Headers:
    """The headers of a trace among others, if they are of a size that may travel."""
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in NAMES and len(value) <= MAX_HEADER_CHARS:
            found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return found if "traceparent" in found else {}

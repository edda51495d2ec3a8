"""Traces requests across services by W3C headers and sends the spans to an OpenTelemetry collector over OTLP/gRPC.

A service without a tracer makes no spans and forwards no headers; no service makes spans of a request that is not
sampled. OpenTelemetry takes several MB, so it is imported only when a tracer is made.
"""

import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context

NAMES = ("traceparent", "tracestate")
"""Headers that are forwarded; https://www.w3.org/TR/trace-context/ defines them."""
MAX_HEADER_CHARS = 512
"""Limit of either header: no vendor's list of states needs more."""

Headers = Mapping[str, str]
NO_HEADERS: Headers = MappingProxyType({})
CURRENT: ContextVar[Headers] = ContextVar("trace_headers", default=NO_HEADERS)
"""Trace of the request that a task works on, for the calls that it makes; empty without a trace."""
Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]

_MAX_QUEUE = 4096  # spans, a few hundred requests; while the collector is unreachable the newest are dropped
_DELAY_MS = 1000
_EXPORT_SECONDS = 2.0
_CLOSE_SECONDS = 2.0


def trace_id_of(headers: Headers) -> str:
    """Return the id of the trace, 32 hex digits; empty without a trace."""
    ids = headers.get("traceparent", "").split("-") if headers else ()
    return ids[1] if len(ids) == 4 else ""


class Tracer:
    """Makes spans. A thread of its own sends them in batches; it drops spans rather than delay a request."""

    def __init__(self, endpoint: str, service: str, instance_id: str) -> None:
        """``endpoint``: http://host:port in plain text, or https://host:port with the system's authorities."""
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        names = {
            "service.name": f"tokenloom-{service.replace('_', '-')}",
            "service.instance.id": instance_id,
            "service.version": version("tokenloom"),
        }
        # Over gRPC, because every part has loaded gRPC already; OTLP over HTTP would bring a second client library.
        self._exporter = OTLPSpanExporter(
            endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_SECONDS
        )
        self._provider = TracerProvider(
            resource=Resource.create(names), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(self._exporter, max_queue_size=_MAX_QUEUE, schedule_delay_millis=_DELAY_MS)
        )
        self._tracer = self._provider.get_tracer("tokenloom")
        self._propagator = TraceContextTextMapPropagator()

    def start(
        self,
        name: str,
        headers: Headers,
        *,
        kind: Literal["server", "internal"] = "internal",
        started_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> "Span | None":
        """Begin a span below the one that ``headers`` name, or a new trace; return None when it is not sampled.

        ``started_ns``: monotonic time; None: now.
        """
        from opentelemetry.trace import SpanKind

        to_epoch = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            self._propagator.extract(headers),
            SpanKind.SERVER if kind == "server" else SpanKind.INTERNAL,
            attributes,
            start_time=None if started_ns is None else started_ns + to_epoch,
        )
        return Span(self._tracer, span, to_epoch) if span.is_recording() else None

    def close(self) -> None:
        """Send what is left, for at most two seconds, and drop the rest."""
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():  # it would try each batch again for seconds
            self._exporter.shutdown()


class Span:
    """A span that has begun. Times are monotonic nanoseconds of this process's clock.

    Attributes:
        headers: The headers for spans below this one.
    """

    def __init__(self, tracer: "trace.Tracer", span: "trace.Span", to_epoch: int) -> None:
        """``to_epoch``: nanoseconds from the monotonic clock to the epoch."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._span = span
        self._to_epoch = to_epoch
        self._context = trace.set_span_in_context(span)
        headers: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(headers, self._context)
        self.headers: Headers = headers

    def child(
        self,
        name: str,
        started_ns: int,
        ended_ns: int,
        attributes: Attributes | None = None,
        below: "Context | None" = None,
    ) -> "Context":
        """Add a span that has already ended, and return its place. ``below``: the place of another one that it is part
        of; None: of this one."""
        from opentelemetry import trace

        child = self._tracer.start_span(
            name, below or self._context, attributes=attributes, start_time=started_ns + self._to_epoch
        )
        child.end(ended_ns + self._to_epoch)
        return trace.set_span_in_context(child)

    def end(self, attributes: Attributes | None = None, error: str = "", ended_ns: int | None = None) -> None:
        """End the span, by default now. ``error``: what went wrong; empty: nothing."""
        if attributes:
            self._span.set_attributes(attributes)
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if ended_ns is None else ended_ns + self._to_epoch)


def pick_headers(pairs: Iterable[tuple[str, str | bytes]]) -> Headers:
    """Pick the headers of a trace out of others, unless they are too long to forward."""
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in NAMES and len(value) <= MAX_HEADER_CHARS:
            found[name] = value.decode("latin-1") if isinstance(value, bytes) else value
    return found if "traceparent" in found else {}

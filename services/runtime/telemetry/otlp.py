"""Spans to an OpenTelemetry collector, over OTLP/gRPC. Imported only where ``--otlp-endpoint`` is given."""

import threading
import time
from importlib.metadata import version
from typing import Literal

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from .tracing import Attributes, Headers, Span

_KINDS = {"server": trace.SpanKind.SERVER, "internal": trace.SpanKind.INTERNAL}
_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_QUEUE = 4096  # spans: a few hundred requests' worth; while the collector is away the newest are dropped
_DELAY_MS = 1000
_EXPORT_SECONDS = 2.0
_CLOSE_SECONDS = 2.0


class OtlpTracer:
    """Fulfils ``Tracer``. A thread of its own batches and sends."""

    def __init__(self, endpoint: str, service: str, instance_id: str) -> None:
        """``endpoint``: http://host:port in plain text, https://host:port with the system's authorities."""
        names = {
            "service.name": f"tokenloom-{service.replace('_', '-')}",
            "service.instance.id": instance_id,
            "service.version": version("tokenloom"),
        }
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"), timeout=_EXPORT_SECONDS)
        self._provider = TracerProvider(
            resource=Resource.create(names), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUE, schedule_delay_millis=_DELAY_MS)
        )
        self._tracer = self._provider.get_tracer("tokenloom")

    def start(
        self,
        name: str,
        headers: Headers,
        *,
        kind: Literal["server", "internal"] = "internal",
        started_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span | None:
        to_epoch = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            name,
            _PROPAGATOR.extract(headers),
            _KINDS[kind],
            attributes,
            start_time=None if started_ns is None else started_ns + to_epoch,
        )
        return _OtlpSpan(self._tracer, span, to_epoch) if span.is_recording() else None

    def close(self) -> None:
        """A collector that does not answer is not waited for: the thread that tries dies with the process."""
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)


class _OtlpSpan:
    """Fulfils ``Span``. ``to_epoch``: nanoseconds from the monotonic clock to the epoch."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span, to_epoch: int) -> None:
        self._tracer = tracer
        self._span = span
        self._to_epoch = to_epoch
        self._context = trace.set_span_in_context(span)

    @property
    def headers(self) -> Headers:
        headers: dict[str, str] = {}
        _PROPAGATOR.inject(headers, self._context)
        return headers

    def child(self, name: str, started_ns: int, ended_ns: int, attributes: Attributes | None = None) -> None:
        child = self._tracer.start_span(
            name, self._context, attributes=attributes, start_time=started_ns + self._to_epoch
        )
        child.end(ended_ns + self._to_epoch)

    def end(self, attributes: Attributes | None = None, error: str = "", ended_ns: int | None = None) -> None:
        if attributes:
            self._span.set_attributes(attributes)
        if error:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        self._span.end(None if ended_ns is None else ended_ns + self._to_epoch)

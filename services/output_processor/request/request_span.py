"""Traces one request in the output processor."""

import time

from tokenloom.services.runtime.telemetry.tracing import Span, Tracer, pick_headers
from tokenloom.v1.output_processor_pb2 import RequestFinished, Submit


class RequestSpan:
    """Holds the output processor's span of one request. The span takes the place of the gateway's in the request's
    headers, so that placements and engines make their spans under it."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._error = ""

    @classmethod
    def open(cls, tracer: Tracer | None, submit: Submit) -> "RequestSpan | None":
        """Begin the span. Without a tracer, or for a request that is not sampled, return None and drop the headers."""
        headers = pick_headers(submit.trace_headers.items())
        submit.trace_headers.clear()
        if tracer is None or not headers:
            return None
        span = tracer.start("process", headers, attributes={"gen_ai.response.id": submit.request_id})
        if span is None:
            return None
        submit.trace_headers.update(span.headers)
        return cls(span)

    def sample_ended(self, finished: RequestFinished) -> None:
        """Add a span from the sample's first token to its last; an attribute says how long making its text took."""
        now, timeline = time.monotonic_ns(), finished.timeline
        attributes = {
            "tokenloom.sample_index": finished.sample_index,
            "tokenloom.attempts": finished.attempts,
            "tokenloom.detokenize.busy_seconds": timeline.detokenize_ns / 1e9,
        }
        self._span.child("detokenize", now - timeline.decode_ns, now, attributes)
        self._error = self._error or finished.error.message

    def end(self) -> None:
        """End the span, with the first error of the samples if there was one."""
        self._span.end(error=self._error)

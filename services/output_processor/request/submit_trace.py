"""The spans of one ``Submit``: the output processor's own, and what is told under it."""

import time

from tokenloom.services.runtime.telemetry.tracing import Span, Tracer, pick_headers
from tokenloom.v1.output_processor_pb2 import RequestFinished, Submit


class RequestTrace:
    """From :meth:`open` to :meth:`end`. Placements and engines make their spans under this one: it takes the place of
    the gateway's in the request's headers."""

    def __init__(self, span: Span) -> None:
        self._span = span
        self._error = ""

    @classmethod
    def open(cls, tracer: Tracer | None, submit: Submit) -> "RequestTrace | None":
        """None when nobody traces the request; then its headers stay with us."""
        headers = pick_headers(submit.trace_headers.items())
        submit.trace_headers.clear()
        if tracer is None or not headers:
            return None
        span = tracer.start("process", headers, attributes={"gen_ai.request.id": submit.request_id})
        if span is None:
            return None
        submit.trace_headers.update(span.headers)
        return cls(span)

    def sample_ended(self, finished: RequestFinished) -> None:
        """From its first token to its last its text was made, piece by piece; the attribute says how long that took."""
        now, timeline = time.monotonic_ns(), finished.timeline
        attributes = {
            "tokenloom.sample_index": finished.sample_index,
            "tokenloom.attempts": finished.attempts,
            "tokenloom.detokenize.busy_seconds": timeline.detokenize_ns / 1e9,
        }
        self._span.child("detokenize", now - timeline.decode_ns, now, attributes)
        self._error = self._error or finished.error.message

    def end(self) -> None:
        """Its last sample ended."""
        self._span.end(error=self._error)

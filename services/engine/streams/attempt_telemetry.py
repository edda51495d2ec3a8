"""Records an attempt's spans, and logs the scheduler's events."""

import logging
from collections.abc import Iterable

from tokenloom.engine_core.data.messages import EngineCoreEvent, FinishReason
from tokenloom.services.runtime.telemetry.logs import RequestLog
from tokenloom.services.runtime.telemetry.tracing import Headers, Tracer

from .attempt import Attempt

log = logging.getLogger(__name__)


def log_events(attempt: Attempt, events: Iterable[EngineCoreEvent]) -> None:
    """Log one line per event, in milliseconds since the attempt arrived: front and core read the same clock."""
    arrival_ms = attempt.times.arrival * 1e3
    for event in events:
        request_log = RequestLog(log, attempt.request_id, attempt.trace_headers)
        request_log.info("%s after %.1f ms", event.type.name.lower(), event.timestamp_ns / 1e6 - arrival_ms)


def trace_attempt(tracer: Tracer, attempt: Attempt, headers: Headers, ended: float) -> None:
    """Record the spans of an attempt that has ended, from the times that the core measured.

    ``headers``: of the output processor's span. ``ended``: monotonic seconds.
    """
    times, tokens = attempt.times, attempt.tokens
    arrival, first = round(times.arrival * 1e9), round(times.first_token * 1e9)
    assert attempt.finish_reason is not None
    attributes: dict[str, str | int] = {
        "gen_ai.request.id": attempt.request_id,
        "gen_ai.usage.input_tokens": tokens.prompt,
        "gen_ai.usage.output_tokens": tokens.output - tokens.accepted,
        "tokenloom.finish_reason": attempt.finish_reason.name.lower(),
        "tokenloom.leg": _leg(attempt),
    }
    # Made at the end, from times that the core reports in any case: the core knows nothing of traces, and a token costs
    # nothing more. A request that dies with its engine leaves no span of that engine.
    span = tracer.start("engine", headers, started_ns=arrival, attributes=attributes)
    if span is None:
        return
    if attempt.kv.wait_ns:
        span.child("kv_transfer", arrival, arrival + attempt.kv.wait_ns)
    if (stats := times.prefill) is not None and first:
        # Computed backwards from the first token: each phase ends where the next one begins.
        scheduled = first - stats.prefill_ns
        span.child("queue", scheduled - stats.queued_ns, scheduled)
        span.child("prefill", scheduled, first, {"tokenloom.cached_tokens": stats.num_cached_tokens})
    if first and times.last_token > times.first_token:
        span.child("decode", first, round(times.last_token * 1e9))
    failed = attempt.finish_reason is FinishReason.ERROR
    span.end(error="the attempt failed" if failed else "", ended_ns=round(ended * 1e9))


def _leg(attempt: Attempt) -> str:
    if attempt.kv.lease_id:
        return "prefill"
    return "decode" if attempt.kv.wait_ns else "whole"
